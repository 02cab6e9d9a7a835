"""What machines there are, where this process stands among them, and how workers are started."""
