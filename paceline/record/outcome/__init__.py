"""Parts of the summary that are not measured elsewhere."""
