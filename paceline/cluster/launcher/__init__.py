"""The launcher: the agent of one host, which starts workers and looks after them."""
