"""The C library: loops over shared memory that Python is too slow for, and how it is built."""
