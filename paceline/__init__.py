"""paceline: train one PyTorch model on many processes, hosts and devices."""
