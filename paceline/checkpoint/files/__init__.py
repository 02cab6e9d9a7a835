"""The files of a checkpoint: writing, checking and reading them."""
