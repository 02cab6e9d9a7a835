"""Commands of `paceline` that are more than a few lines: each a module with its options."""
