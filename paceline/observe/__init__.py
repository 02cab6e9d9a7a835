"""What happened, told to people."""
