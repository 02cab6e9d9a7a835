"""The workers that a launcher has started, as Lightning asks for them."""

from __future__ import annotations

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from paceline.bridges.bridge_run import BridgeRun


class WorkersEnvironment(ClusterEnvironment):
    """Places of workers that exist already, so that Lightning starts no processes.

    Args:
        bridge: The run, which need not be open.
    """

    def __init__(self, bridge: BridgeRun) -> None:
        self._bridge = bridge

    @property
    def creates_processes_externally(self) -> bool:
        """Whether a launcher has started the workers: always."""
        return True

    @property
    def main_address(self) -> str:
        """Address at which the workers meet."""
        meeting = self._bridge.place.meeting
        return "127.0.0.1" if meeting is None else meeting[0]

    @property
    def main_port(self) -> int:
        """Port at which the workers meet; 0 for a single worker."""
        meeting = self._bridge.place.meeting
        return 0 if meeting is None else meeting[1]

    @staticmethod
    def detect() -> bool:
        """Whether Lightning may choose this environment by itself: never."""
        return False

    def world_size(self) -> int:
        """Number of workers."""
        bridge = self._bridge
        return bridge.run.size if bridge.is_open else bridge.place.size

    def set_world_size(self, size: int) -> None:
        """Do nothing, as the launcher decides."""

    def global_rank(self) -> int:
        """Rank of this worker among all workers."""
        bridge = self._bridge
        return bridge.run.rank if bridge.is_open else bridge.place.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, as the launcher decides."""

    def local_rank(self) -> int:
        """Rank of this worker among the workers of its host."""
        bridge = self._bridge
        return bridge.run.local_rank if bridge.is_open else bridge.place.local_rank

    def node_rank(self) -> int:
        """Number of this worker's host, as the launcher counts them."""
        return self._bridge.place.host_rank or 0
