"""Fault tolerance: checkpoints on disk, replicas in the memory of other hosts, and the plan after a loss."""
