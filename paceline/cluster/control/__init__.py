"""The control channel between a launcher and its workers: commands down, events up."""
