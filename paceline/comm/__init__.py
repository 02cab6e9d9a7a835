"""How tensors travel between workers."""
