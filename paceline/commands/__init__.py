"""The commands of `paceline` that need more than a few lines, a module for each."""
