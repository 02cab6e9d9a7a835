"""Which samples go to which worker."""
