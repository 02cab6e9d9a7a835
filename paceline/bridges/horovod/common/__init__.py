"""Horovod's API without a framework: start, errors, process sets, elastic state."""
