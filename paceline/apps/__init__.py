"""Small complete programs, which the demo, tests and benchmarks run."""
