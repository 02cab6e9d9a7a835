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
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                "ProcessSet should be initialized with a list of process ranks; a communicator of "
                f"MPI ({ranks_or_comm!r}) can't be used, as paceline doesn't use MPI"
            )
        self.process_set_id: int | None = None
        self._ranks: list[int] = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in self._ranks):
            raise ValueError("ProcessSet should be initialized with a list of process ranks")

    @property
    def ranks(self) -> list[int]:
        """Global ranks in order."""
        # the set of all ranks is an object of the module, which outlives a change of the ranks
        return [*range(PROCESS.engine.size)] if self.process_set_id == 0 else self._ranks

    def join_job(self) -> None:
        """Become a process set of the job, as `add_process_set` has it."""
        try:
            PROCESS.engine.submit("add_process_set", numbers=self.ranks).wait()
        except HorovodInternalError as error:
            if PROCESS.engine.ended:
                raise
            raise ValueError(f"Attempted to add a duplicate process set: {error}") from error
        ids = {ranks: number for number, ranks in PROCESS.engine.process_sets.items()}
        self.process_set_id = ids[tuple(self.ranks)]

    def leave_job(self) -> bool:
        """Stop being a process set of the job, as `remove_process_set` has it."""
        number = self.process_set_id
        if not number:  # the set of all ranks stays
            return False
        self.process_set_id = None
        PROCESS.engine.submit("remove_process_set", numbers=[number]).wait()
        return True

    def size(self) -> int | None:
        """Number of its ranks. None before it was added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Index of this process in it. None before it was added."""
        if self.process_set_id is None:
            return None
        return self.ranks.index(PROCESS.engine.rank)

    def included(self) -> bool:
        """Whether this process is one of its ranks."""
        return PROCESS.engine.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set. Collective: all ranks of the job call it with the same ranks.

    Raises:
        ValueError: A set of these ranks exists already, or the ranks differ.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    added.join_job()
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Collective. Returns whether there was one to remove."""
    return process_set.leave_job()
