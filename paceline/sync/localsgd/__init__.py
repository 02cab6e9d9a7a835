"""Local SGD and its relatives: replicas that step on their own and average now and then."""
