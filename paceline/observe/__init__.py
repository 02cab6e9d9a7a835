"""Reports on runs: where the time went, and what to do about it."""
