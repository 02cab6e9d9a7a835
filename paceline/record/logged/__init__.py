"""The values that scripts log."""
