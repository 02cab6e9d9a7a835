"""When replicas agree."""
