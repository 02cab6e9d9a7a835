"""The training loop: turns of loaders, steps, and what is undone when one fails."""
