"""Tensor parallelism: workers have the same samples at the same time, and parts of each layer."""
