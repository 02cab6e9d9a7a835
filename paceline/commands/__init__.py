"""Commands of `paceline` that need more than a few lines, with a module for each."""
