"""The worker's side of sparse tables."""
