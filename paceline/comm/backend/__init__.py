"""paceline as a backend of torch.distributed."""
