"""Whether replicas are equal, and whole parameters of cut models."""
