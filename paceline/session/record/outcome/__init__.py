"""What the summary says of who took part in a run, and of what was asked for."""
