"""Strategies: when and how replicas agree, seen from a worker."""
