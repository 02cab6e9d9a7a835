"""Sparse tables, seen from a worker."""
