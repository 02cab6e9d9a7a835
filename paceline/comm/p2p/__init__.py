"""Messages of tensors between two workers: what they are, and the ways they go."""
