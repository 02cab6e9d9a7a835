"""Groups over several hosts: shared memory inside a host, one copy of each value between hosts."""
