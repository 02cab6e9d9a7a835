"""Workers that call a function, from a notebook or a script (`pl.launch`)."""
