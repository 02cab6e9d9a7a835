"""Whether replicas are equal, and what to do if they aren't."""
