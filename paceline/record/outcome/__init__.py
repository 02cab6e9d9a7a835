"""What a summary says that isn't measured elsewhere."""
