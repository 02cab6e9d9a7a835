"""Groups inside one host, in shared memory."""
