"""The training loop: turns of loaders, steps, and what is counted in them."""
