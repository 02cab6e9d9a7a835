"""What `Run.prepare` does to the user's own objects."""
