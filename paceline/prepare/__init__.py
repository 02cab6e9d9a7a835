"""What `run.prepare` does to a script's objects."""
