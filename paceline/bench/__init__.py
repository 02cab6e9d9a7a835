"""Benchmarks: collectives and training steps, measured on the cluster at hand."""
