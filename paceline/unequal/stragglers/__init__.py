"""Workers that make the others wait, and why."""
