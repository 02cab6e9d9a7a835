"""Benchmarks of collectives and training steps, for the cluster of a user."""
