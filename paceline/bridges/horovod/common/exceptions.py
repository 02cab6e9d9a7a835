"""Horovod's errors, with the names under which its users catch them."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective operation has failed. `elastic.run` goes on from the last commit after it."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed. `elastic.run` goes on with the state as it is.

    Args:
        skip_sync: Whether the state of all workers is equal anyway.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync
