"""The training loop: turns of loaders, steps, and rollback of a turn that failed."""
