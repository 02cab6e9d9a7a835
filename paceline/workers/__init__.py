"""Who takes part: groups and axes."""
