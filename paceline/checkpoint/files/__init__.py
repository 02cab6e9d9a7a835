"""The files of a checkpoint, and what is read from them."""
