"""The main path: start, prepare, step, log."""
