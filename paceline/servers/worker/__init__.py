"""The parameter server, seen from a worker."""
