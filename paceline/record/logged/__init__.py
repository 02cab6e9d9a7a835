"""What scripts log."""
