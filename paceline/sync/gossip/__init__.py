"""Gossip: replicas that average with a neighbour of a graph."""
