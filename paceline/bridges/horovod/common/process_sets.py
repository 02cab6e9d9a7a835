"""Process sets: some of the ranks, which run operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.bridges.horovod.common.basics import PROCESS
from paceline.bridges.horovod.common.exceptions import HorovodInternalError


class ProcessSet:
    """Some of the ranks. Give it to `hvd.init` or `hvd.add_process_set`, then to operations.

    Args:
        ranks_or_comm: Global ranks. A communicator of MPI is refused.

    Attributes:
        process_set_id: Its number once it was added, else None.
        ranks: Its global ranks in order.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                "ProcessSet should be initialized with a list of process ranks; a communicator of "
                f"MPI ({ranks_or_comm!r}) can't be used, as paceline doesn't use MPI"
            )
        self.process_set_id: int | None = None
        self.ranks: list[int] = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in self.ranks):
            raise ValueError("ProcessSet should be initialized with a list of process ranks")

    def size(self) -> int | None:
        """Number of its ranks. None before it was added."""
        return None if self.process_set_id is None else len(self._current_ranks())

    def rank(self) -> int | None:
        """Index of this process in it. None before it was added."""
        if self.process_set_id is None:
            return None
        return self._current_ranks().index(PROCESS.engine.rank)

    def included(self) -> bool:
        """Whether this process is one of its ranks."""
        return PROCESS.engine.rank in self._current_ranks()

    def _current_ranks(self) -> Sequence[int]:
        # the set of all ranks is an object of the module, which outlives a change of the ranks
        return range(PROCESS.engine.size) if self.process_set_id == 0 else self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. Collective: all ranks of the job call it with the same ranks.

    Raises:
        ValueError: A set of these ranks exists already, or the ranks differ.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = tuple(process_set.ranks)
    try:
        PROCESS.engine.submit("add_process_set", numbers=ranks).wait()
    except HorovodInternalError as error:
        if PROCESS.engine.ended:
            raise
        raise ValueError(f"Attempted to add a duplicate process set: {error}") from error
    ids = {ranks: number for number, ranks in PROCESS.engine.process_sets.items()}
    process_set.process_set_id = ids[ranks]
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective. Returns whether there was one to remove."""
    number = process_set.process_set_id
    if not number:  # the set of all ranks stays
        return False
    process_set.process_set_id = None
    PROCESS.engine.submit("remove_process_set", numbers=[number]).wait()
    return True
