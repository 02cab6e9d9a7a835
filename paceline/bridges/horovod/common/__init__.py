"""What Horovod's API has for every framework: the start, the errors, process sets, elastic state."""
