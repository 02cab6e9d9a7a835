"""Joins the workers of this job, and opens their run: `pl.start()`."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Final, Literal

from paceline.at_exit import call_at_exit
from paceline.cluster.control import events
from paceline.cluster.control.progress import ProgressPage, open_page
from paceline.cluster.discover import Place, discover_place
from paceline.cluster.launcher.janitor import brand_semaphores
from paceline.cluster.launcher.output import open_missing_streams
from paceline.cluster.mesh import choose_mesh
from paceline.cluster.store import connect_store, discover_hosts
from paceline.cluster.topology import HostRanks, Topology
from paceline.comm.agreement import Agreement
from paceline.comm.axis_groups import Sender
from paceline.comm.native.default_group import DefaultProcessGroup
from paceline.elastic.state_copies import check_replicate
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice
from paceline.notation import parse_strategy as read
from paceline.prepare import cuts
from paceline.record.folder import script_name
from paceline.record.hangs import HangDetector, check_late_after
from paceline.record.log import OnNan
from paceline.record.trackers import catalogue
from paceline.record.trackers.tracker import Tracker
from paceline.replicas.compare import Comparison, Differing
from paceline.servers.server_starter import ServerStarter
from paceline.servers.worker.quorum import QuorumSync
from paceline.session.assemble import JoinedWorker, assemble_run
from paceline.session.excepthook import (
    BRIEF_ERRORS,
    install_excepthook,
    show_errors_briefly,
    show_exception,
)
from paceline.session.option_names import refuse_unknown_options
from paceline.session.records import RecordOpener
from paceline.session.registration import register
from paceline.session.run import Run, parts_of_run
from paceline.session.torch_backend import make_default_group
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Strategy
from paceline.sync.context import StepState, SyncContext
from paceline.sync.route_choice import RouteFacts
from paceline.trace import Trace
from paceline.unequal.probe.cluster_file import ClusterFile, Measured
from paceline.unequal.shares.quota import ProcessorQuota
from paceline.unequal.stragglers import straggler_policy
from paceline.unequal.stragglers.straggler_policy import Policy
from paceline.workers.axes import RunAxes
from paceline.workers.copy_interval import Replicate
from paceline.workers.groups import CurrentView, WorkerContext, choose_device, make_group_of_all

TraceLength = Literal["last", "all", "off"]
TRACES: Final[Mapping[TraceLength, int | None]] = {"last": 20_000, "all": None, "off": 0}  # spans

__all__ = ["Run", "start"]


@show_errors_briefly
@refuse_unknown_options
def start(
    sync: Strategy | str | None = None,
    *,
    name: str | None = None,
    folder: str = "runs",
    seed: int | None = None,
    device: str | None = None,
    deadline: float = 120.0,
    late_after: float | None = None,
    trace: TraceLength = "last",
    on_nan: OnNan = "warn",
    total_steps: int | None = None,
    compare: int | Literal["auto"] | None = "auto",
    differing: Differing = "stop",
    replicate: Replicate = "auto",
    mesh: str | None = None,
    straggler: Policy | None = None,
    cluster: Measured | None = None,
    report_to: str | Sequence[str] | None = None,
) -> Run:
    """Join the workers that were started with this process, and open a run.

    >>> with pl.start() as run:
    ...     model, optimizer, loader = run.prepare(model, optimizer, loader)

    torchrun, Slurm, MPI and `paceline run` start workers. A process that is started alone is one
    worker. The run is a context manager; without `with` it is closed when the process exits.

    Args:
        sync: Strategy, as an object or as text ("LocalSGD(every=8)"). Default: `AllReduce()`.
            `paceline run --sync` overrides it.
        name: Name of the run's folder. Default: the date and time.
        folder: Folder of all runs. Default: "runs".
        seed: Seed of the run, the same on all workers as `run.seed`. Default: drawn by the first
            worker.
        device: "cpu", "cuda" or "cuda:i". Default: a GPU for each worker if there is one, else
            "cpu".
        deadline: Seconds after which a wait for other workers ends with an error that names the
            missing workers. Default: 120.
        late_after: Seconds after which `paceline run` shows what a late worker is doing. Default:
            ten times the usual length of a call, at least 5.
        trace: Steps whose spans `trace.json` keeps: "last" (the last steps, the default), "all" or
            "off".
        on_nan: What happens when a logged loss is not a number: "warn" (default) or "stop".
        total_steps: Number of steps, for the time left. Default: from the script's epochs.
        compare: Number of steps between two comparisons of all replicas; None for never. Default:
            "auto", which is 100 if the strategy makes replicas equal at times.
        differing: What happens when replicas differ: "stop" (default), or "heal", which gives a
            deviating replica the values that most replicas have.
        replicate: How often state that only one worker has (residuals of a codec, changes since the
            last round) is copied to a worker on another host: a number of steps, "auto" or "off".
            "auto" (default) takes at most a tenth of the time, and copies on several hosts only.
            Needs `paceline run --min-workers`.
        mesh: Grid of the workers for models that are cut, such as "data=2, tensor=2". See
            docs/cuts.md. Default: all workers along "data".
        straggler: What happens to workers that make the others wait: "warn" (default), "rebalance"
            (default with `shares="auto"`), "drop" or "evict".
        cluster: File that `paceline probe` wrote, or the result of `pl.probe`. paceline then
            chooses the routes between hosts by measured links. See docs/unequal.md.
        report_to: Trackers that the first worker reports to: one name or a list of "tensorboard",
            "wandb", "mlflow" and "prometheus", each with an option after a colon
            ("prometheus:9500"). See docs/looking.md. `paceline run --report-to` overrides it.

    Returns:
        The `Run`.

    Raises:
        UsageError: An option has no such value, or two options don't go together.
        DeadlineExceeded: Other workers didn't come in time.
    """
    _refuse_another_import()
    _check_options(deadline, trace, on_nan, replicate)
    began, comparison, place = time.time(), Comparison(compare, differing), discover_place()
    strategy, policy = _choose_strategy(place, sync, straggler)
    file = ClusterFile.read_cluster(
        cluster if place.cluster is None else place.cluster, survives=place.worker is not None
    )
    trackers = _choose_trackers(place, report_to)
    seconds = _resolve_deadline(place, deadline, late_after)
    # the store stays open: other workers may still read there why this worker failed
    with _report_failures(place), ExitStack() as undo:
        announcer, page = _report_arrival(place, began, seconds)
        worker = _meet_others(
            place,
            device,
            seconds,
            file,
            announcer.announce,
            trace=Trace(TRACES[trace]),
            page=page,
            replicate=replicate,
        )
        joined = _join_groups(worker, late_after, undo, _choose_mesh(place, mesh), policy)
        announcer.follow_view(joined.view)
        opened = RecordOpener(
            joined, folder, name, on_nan, strategy=strategy, trackers=trackers
        ).open_records
        seed = _choose_seed(place, seed)
        run = assemble_run(
            joined,
            strategy,
            seed=seed,
            began=began,
            comparison=comparison,
            open_records=opened,
            total_steps=total_steps,
        )
        undo.pop_all()
    return ExitHooks(run).install_hooks()


def _resolve_deadline(place: Place, deadline: float, late_after: float | None) -> float:
    """Choose the deadline of all waits, in seconds: the launcher's, else the script's.

    Raises `UsageError` if the deadline ends before a worker counts as late.
    """
    seconds = deadline if place.deadline is None else place.deadline
    check_late_after(late_after, seconds, timings=place.timings.hangs)
    return seconds


def _report_arrival(
    place: Place, began: float, seconds: float
) -> tuple[Announcer, ProgressPage | None]:
    """Tell the launcher that this worker has begun; make its announcer and progress page."""
    events.report_joined(place)
    return Announcer(place), open_page(place.progress, began, deadline=seconds)


def _choose_seed(place: Place, script_seed: int | None) -> int | None:
    """Choose the seed: from the run that is joined or resumed, else from the script."""
    if place.run is not None:
        return place.run[1]
    start = place.job_start
    return script_seed if start is None or start.folder is None else start.seed


@contextmanager
def _report_failures(place: Place) -> Iterator[None]:
    """Report an error of this worker to the launcher, and raise it again."""
    try:
        yield
    except BaseException as error:
        events.report_failure(place, type(error), error)
        raise


def _refuse_another_import() -> None:
    """End a spawned process that imports the script again, with one line.

    A traceback of multiprocessing would hide that line.
    """
    # `_inheriting` is private in CPython; if it goes away, such a process runs on, and fails for
    # lack of something that it hasn't inherited
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(
            f"paceline: a process that {script_name()} has spawned (a "
            f"reader of a DataLoader?) imports {script_name()} again, and came to pl.start: "
            'put what the script does behind `if __name__ == "__main__":`'
        )


def _check_options(deadline: float, trace: str, on_nan: str, replicate: Replicate) -> None:
    check_replicate(replicate)
    if wrong := describe_unknown_choice("trace", trace, TraceLength) or describe_unknown_choice(
        "on_nan", on_nan, OnNan
    ):
        raise UsageError(wrong)
    if not deadline > 0:
        raise UsageError(f"deadline={deadline} is not a time; give seconds above 0")


def _meet_others(
    place: Place,
    device: str | None,
    seconds: float,
    file: ClusterFile | None,
    say: Callable[[str], None],
    *,
    trace: Trace,
    page: ProgressPage | None,
    replicate: Replicate,
) -> WorkerContext:
    """Meet the other workers, and find the host of each."""
    open_missing_streams()  # before the first socket
    if place.job is not None:
        brand_semaphores(place.job)
    store = connect_store(place, deadline=seconds)
    alone, digest = (
        Topology((HostRanks(place.hostname, (0,), "127.0.0.1"),)),
        "" if file is None else file.digest,
    )
    cluster = discover_hosts(store, place, digest) if place.size > 1 else alone
    local = cluster.host_of(place.rank).ranks.index(place.rank)
    worker = WorkerContext(
        place,
        store,
        cluster,
        choose_device(device, local),
        seconds,
        say,
        trace,
        replicate=replicate,
        page=page,
    )
    worker.links = _read_links(worker, file)
    if isinstance(replicate, int) and place.worker is None:
        say(
            f"replicate={replicate} has no effect: the loss of a worker ends this run; "
            "to go on without it, give `paceline run --min-workers`"
        )
    return worker


def _read_links(worker: WorkerContext, file: ClusterFile | None) -> RouteFacts | None:
    """Read the links of this run from a measured cluster, which must have the same hosts."""
    if file is None:
        return None
    file.check_topology(worker.cluster)
    if worker.device.type == "cuda":
        worker.say(f"{file.source} decides nothing here: NCCL or Gloo route the gradients of GPUs")
        return None
    return file.route_facts(worker.cluster)


def _join_groups(
    worker: WorkerContext,
    late_after: float | None,
    undo: ExitStack,
    mesh_text: str | None,
    policy: Policy | None,
) -> JoinedWorker:
    # a worker that joins later is a replica of the first workers, so it has no mesh of its own
    without_mesh = mesh_text is None or worker.place.joining
    mesh = (
        None
        if without_mesh or mesh_text is None
        else choose_mesh(mesh_text, worker.cluster, survives=worker.place.worker is not None)
    )
    # each thing that is opened is entered in `undo`, which closes it if the start fails
    context, default = _make_context(worker, undo)
    undo.callback(_close_groups, context.extra_groups)
    view = CurrentView(worker)
    axes = (
        RunAxes.from_replicas(context, lambda: view.cluster)
        if mesh is None
        else RunAxes.from_mesh(mesh, context, worker.cluster)
    )
    watching = HangDetector(
        worker.place,
        axes.slice.agreement,
        worker.deadline,
        late_after,
        others=axes.wait_sources,
    )
    undo.callback(watching.stop_watching)
    quota = ProcessorQuota(len(worker.cluster.host_of(worker.place.rank).ranks))
    return JoinedWorker(view, axes, watching, default, quota, policy)


def _close_groups(groups: Iterable[Sender]) -> None:
    for group in [*groups]:
        group.abort()
        group.close()


def _make_context(
    worker_context: WorkerContext, undo: ExitStack
) -> tuple[SyncContext, DefaultProcessGroup | None]:
    """Make the group of all workers, torch's default group, and the context of strategies."""
    group = make_group_of_all(worker_context)
    undo.callback(group.close)
    undo.callback(group.abort)
    register()
    default = make_default_group(worker_context, group)
    if default is not None:
        undo.callback(default.close, failed=True)
    step_state = StepState(scale=1.0 / group.size)
    agreement = Agreement(
        group, step=lambda: step_state.step, hosts=worker_context.cluster.host_names()
    )
    context = SyncContext(
        group,
        agreement,
        step_state,
        worker_context.trace,
        worker_context.cluster.host_by_rank(),
        worker_context.say,
        worker_context.make_native_group,
        servers=ServerStarter(worker_context, agreement).start_servers,
        table_servers=ServerStarter(
            worker_context, agreement, "SparseEmbedding", "table server"
        ).start_servers,
        begin_quorum=QuorumSync,
        deadline=worker_context.deadline,
        survives=worker_context.place.worker is not None,
        cancel_scope=worker_context.cancel_scope,
        timings=worker_context.place.timings,
        route_facts=worker_context.links,
    )
    return context, default


def _choose_trackers(place: Place, report_to: Any) -> list[Tracker]:
    """Choose trackers: from the command line, else from the script; none without training."""
    specs = catalogue.parse_trackers(place.report_to if place.report_to is not None else report_to)
    if place.rank == 0 or place.worker is not None:
        catalogue.check_trackers_installed(specs)
    return [] if place.layout or place.profile else catalogue.make_trackers(specs)


def _choose_mesh(place: Place, script_mesh: str | None) -> str | None:
    """Choose the mesh: from the command line, the script, or the only axis of `--cut`."""
    if place.mesh is not None or script_mesh is not None or place.cut is None:
        return script_mesh if place.mesh is None else place.mesh
    names = sorted({cut.axis for cut in cuts.read_cuts(place.cut) if cut.axis})
    if len(names) > 1:
        raise UsageError(
            f"--cut {place.cut!r} cuts along {' and '.join(names)}: say how many workers along "
            f"which, --mesh '{names[0]}, {names[1]}=2'"
        )
    return names[0] if names else None


def _parse_strategy(sync: Any) -> Strategy:
    if sync is None:
        return AllReduce()
    strategy = read(sync) if isinstance(sync, str) else sync
    if not hasattr(strategy, "begin"):
        raise UsageError(
            f"sync={sync!r} is not a strategy; write e.g. "
            "sync=AllReduce() or sync='AllReduce(via=\"ring\")'"
        )
    return strategy  # type: ignore[no-any-return]


def _choose_strategy(
    place: Place, sync: Any, straggler: Policy | None
) -> tuple[Strategy, Policy | None]:
    """Choose the strategy and the straggler policy: the command line's, else the script's."""
    strategy = _parse_strategy(place.sync if place.sync is not None else sync)
    policy = straggler_policy.read_policy(
        place.straggler if place.straggler is not None else straggler
    )
    straggler_policy.check_policy(policy, strategy, survives=place.worker is not None)
    return strategy, policy


class Announcer:
    """Prints messages once, on the first worker."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._view: CurrentView | None = None
        self._printed_messages: set[str] = set()

    def follow_view(self, view: CurrentView) -> None:
        """Print on the first worker of `view`, which may change when workers leave."""
        self._view = view

    @property
    def _is_first(self) -> bool:
        return (
            self._place.rank == 0 and not self._place.joining
            if self._view is None
            else self._view.is_first
        )

    def announce(self, text: str) -> None:
        """Print `text` on stderr, unless it was said before."""
        text = text.removeprefix("paceline: ")
        if self._is_first and text not in self._printed_messages:
            print(f"paceline: {text}", file=sys.stderr, flush=True)
        self._printed_messages.add(text)


class ExitHooks:
    """Closes a run that is used without `with`, at exit.

    An uncaught exception is reported first.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._process = run, os.getpid()

    def install_hooks(self) -> Run:
        """Hook into the end of this process. `run.close` removes the hooks."""
        previous = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            # threads of multiprocessing call this hook, too, for connection errors that end nothing
            if self._is_own_process() and threading.current_thread() is threading.main_thread():
                parts_of_run(self._run).ending.end_after_error(kind, error)
            (show_exception if previous is sys.__excepthook__ else previous)(kind, error, trace)

        def close() -> None:
            try:
                self._run.close()
            # the traceback would show only this call of our own
            except BRIEF_ERRORS as error:
                show_exception(type(error), error, None)

        unregister = call_at_exit(close)

        def disarm() -> None:
            unregister()
            if sys.excepthook is hook:
                sys.excepthook = previous
            # the error is on its way out of the `with` block, and is shown after this hook is gone
            if isinstance(sys.exception(), BRIEF_ERRORS):
                install_excepthook()

        sys.excepthook = hook
        parts_of_run(self._run).ending.on_close(disarm)
        return self._run

    def _is_own_process(self) -> bool:
        """Whether this is the process that joined.

        Forked readers of a DataLoader inherit these hooks.
        """
        return os.getpid() == self._process
