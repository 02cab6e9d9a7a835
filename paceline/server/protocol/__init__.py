"""The messages between workers and servers: a frozen dataclass for each request, and for what answers it."""
