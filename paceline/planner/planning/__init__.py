"""`pl.plan`: from a script, its profile or a finished run, and a cluster, to the answer."""
