"""The start and the end of Horovod's API in this process, and what it says of ranks and hosts.

hvd.init()  ->  Place  ->  Store  ->  Topology  ->  group of all ranks  ->  OperationEngine
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

import torch

from paceline.at_exit import call_at_exit
from paceline.bridges.horovod.common.exceptions import HorovodInternalError
from paceline.bridges.horovod.common.members import ChangingMembers
from paceline.bridges.horovod.engine.engine import OperationEngine
from paceline.bridges.horovod.engine.timeline import OperationTimeline
from paceline.cluster.control import events
from paceline.cluster.discover import Place, discover_place
from paceline.cluster.launcher.output import open_missing_streams
from paceline.cluster.store import connect_store, discover_hosts, make_local_store
from paceline.cluster.topology import HostRanks, Topology
from paceline.comm.cancellation import CancelScope
from paceline.comm.group_protocol import Group
from paceline.errors import PacelineError, UsageError
from paceline.workers.groups import WorkerContext, make_group_of_all

_DEADLINE_SECONDS: Final = 120.0  # as pl.start has it; `paceline run --deadline` replaces it


class HorovodProcess:
    """This process as a rank of a Horovod job.

    Horovod's API has one job per process, which its functions find without an argument, so there is
    one object of this class: `PROCESS`. It is empty before `start` and after `stop`.
    """

    def __init__(self) -> None:
        self._engine: OperationEngine | None = None
        self._worker: WorkerContext | None = None
        self._members: ChangingMembers | None = None  # if the job goes on when ranks die
        self._topology: Topology | None = None
        self._starts = 0

    @property
    def engine(self) -> OperationEngine:
        """The engine. `ValueError` before `hvd.init`."""
        if self._engine is None:
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        return self._engine

    @property
    def topology(self) -> Topology:
        """The hosts of the job, with their ranks. `ValueError` before `hvd.init`."""
        assert self.engine is not None
        assert self._topology is not None
        return self._topology

    @property
    def is_started(self) -> bool:
        """Whether operations can be submitted."""
        return self._engine is not None

    def start(self) -> bool:
        """Meet the other ranks, unless that has been done. Collective.

        Returns:
            Whether this call has done it.
        """
        if self._engine is not None and not self._engine.ended:
            return False
        self.stop()
        if self._worker is None:
            self._worker = _meet_ranks()
            if self._worker.place.worker is not None:
                self._members = ChangingMembers(self._worker)
            call_at_exit(self._leave)
            _report_uncaught_errors(self._worker.place)
        worker, group = self._meet_again(self._worker)
        self._topology = worker.cluster
        self._engine = OperationEngine(group, deadline=worker.deadline, warn=_print_message)
        return True

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on when ranks die."""
        return self._members is not None

    def has_newer_view(self) -> bool:
        """Whether other ranks wait to come in, as far as this rank knows."""
        return self._members is not None and self._members.has_newer_view()

    def _meet_again(self, first: WorkerContext) -> tuple[WorkerContext, Group]:
        if self._members is not None:
            return self._members.meet()
        # a job that starts again in the same processes has other keys in the store
        self._starts += 1
        store = first.store.open_substore(f"horovod{self._starts}")
        worker = replace(first, store=store, natives=0, cancel_scope=CancelScope())
        try:
            return worker, make_group_of_all(worker)
        except UsageError:
            raise
        except PacelineError as error:
            raise HorovodInternalError(str(error)) from error

    def _leave(self) -> None:
        """End at the exit of the process."""
        self.stop()
        if self._members is not None and self._worker is not None:
            events.report_closed(self._worker.place)

    def stop(self) -> None:
        """End the engines of all ranks. `start` may follow."""
        if self._engine is not None:
            self._engine.shut_down()
            self._engine = None


def _meet_ranks() -> WorkerContext:
    open_missing_streams()
    place = discover_place()
    deadline = _DEADLINE_SECONDS if place.deadline is None else place.deadline
    if place.joining:  # it meets the others in a view
        alone = Topology((HostRanks(place.hostname, (place.rank,), "127.0.0.1"),))
        store = make_local_store(place.secret, deadline=deadline)
        return WorkerContext(place, store, alone, torch.device("cpu"), deadline, _print_message)
    store = connect_store(place, deadline=deadline)
    cluster = discover_hosts(store, place)
    return WorkerContext(place, store, cluster, torch.device("cpu"), deadline, _print_message)


def _report_uncaught_errors(place: Place) -> None:
    """Report an error that ends this process before other ranks can fail because of it.

    So the launcher names this rank, and not one that has waited for it.
    """
    show_error = sys.excepthook

    def report_and_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        events.report_failure(place, kind, error)
        show_error(kind, error, trace)

    sys.excepthook = report_and_show


def _print_message(text: str) -> None:
    print(f"paceline: {text.removeprefix('paceline: ')}", file=sys.stderr, flush=True)


PROCESS: Final = HorovodProcess()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Meet the other ranks. Calls after the first have no effect until `shutdown`.

    Args:
        comm: Ranks that take part. Only all of them are possible. Default: all.
        process_sets: Process sets to add, or "dynamic". Sets may be added at any time here.

    Raises:
        UsageError: `comm` is a communicator of MPI, or leaves ranks out.
    """
    started = PROCESS.start()
    everyone = list(range(PROCESS.engine.size))
    if comm is not None and not (isinstance(comm, list | tuple) and [*comm] in ([], everyone)):
        shutdown()
        raise UsageError(
            f"hvd.init(comm={comm!r}) can't be honoured: paceline has all {len(everyone)} ranks of "
            "the job in it; use hvd.add_process_set for a part of them"
        )
    if started:
        for process_set in () if process_sets in (None, "dynamic") else process_sets:
            process_set.join_job()


def shutdown() -> None:
    """End Horovod on all ranks. `init` may follow."""
    PROCESS.stop()


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` has not."""
    return PROCESS.is_started


def size() -> int:
    """Number of ranks."""
    return PROCESS.engine.size


def rank() -> int:
    """Rank of this process."""
    return PROCESS.engine.rank


def local_size() -> int:
    """Number of ranks on this host."""
    return len(PROCESS.topology.host_of(rank()).ranks)


def local_rank() -> int:
    """Index of this process among the ranks of its host."""
    return PROCESS.topology.host_of(rank()).ranks.index(rank())


def cross_size() -> int:
    """Number of hosts that have a rank of this local rank."""
    return len(_hosts_with(local_rank()))


def cross_rank() -> int:
    """Index of this host among those that have a rank of this local rank."""
    return [rank() in ranks for ranks in _hosts_with(local_rank())].index(True)


def _hosts_with(index: int) -> list[tuple[int, ...]]:
    return [host.ranks for host in PROCESS.topology.hosts if len(host.ranks) > index]


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    return len({len(host.ranks) for host in PROCESS.topology.hosts}) == 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write from now on what the engine does, on rank 0, in the format of chrome://tracing."""
    stop_timeline()
    if rank() == 0:
        PROCESS.engine.write_timeline(OperationTimeline(file_path, mark_cycles=mark_cycles))


def stop_timeline() -> None:
    """End the file of `start_timeline`."""
    PROCESS.engine.write_timeline(None)


def mpi_threads_supported() -> bool:
    """Whether MPI may be used from several threads: False, as MPI isn't used."""
    return False


def mpi_enabled() -> bool:
    """Whether MPI carries tensors: False."""
    return False


def mpi_built() -> bool:
    """Whether MPI can carry tensors: False. mpirun may start the ranks all the same."""
    return False


def gloo_enabled() -> bool:
    """Whether ranks meet without MPI: True, as with Horovod's Gloo."""
    return True


def gloo_built() -> bool:
    """Whether tensors of the CPU travel without MPI: True, as with Horovod's Gloo."""
    return True


def nccl_built() -> int:
    """Version of NCCL: 0, as tensors on GPUs travel through the memory of the host."""
    return 0


def ddl_built() -> bool:
    """Whether IBM's DDL is there: False."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL is there: False."""
    return False


def cuda_built() -> bool:
    """Whether tensors on GPUs travel without a copy to the host: False."""
    return False


def rocm_built() -> bool:
    """Whether tensors on AMD's GPUs travel without a copy to the host: False."""
    return False
