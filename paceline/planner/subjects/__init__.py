"""What is planned: a script, a profile of it, or a finished run, on a cluster."""
