"""Starting workers from a notebook or any Python, with a function in the place of a script."""
