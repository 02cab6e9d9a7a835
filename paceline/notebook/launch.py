"""`pl.launch`: starts workers from a notebook or script, and collects the results of a function.

In the function, `with pl.start() as run:` joins the workers, as in a script that `paceline run`
starts.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, TypeVarTuple, Unpack

from paceline import notation
from paceline.cluster.control import calls
from paceline.cluster.control.calls import CallMessage
from paceline.cluster.discover import copy_environment, discover_place, read_timings
from paceline.cluster.launcher.request import Backend, LaunchRequest, Straggler, check_request
from paceline.errors import UsageError, WorkerFailed
from paceline.notebook import packing
from paceline.notebook.notebook import NotebookBar, is_notebook_kernel
from paceline.notebook.process import LauncherProcess
from paceline.notebook.proof import check_job
from paceline.record.call_status import StatusRelay
from paceline.record.display import choose_display
from paceline.record.status_line import StatusLine
from paceline.session import option_names

# At run time these would import torch into the process that launches.
if TYPE_CHECKING:
    from paceline.prepare.cuts import WantedCuts
    from paceline.sync.base import Strategy

T = TypeVar("T")
Args = TypeVarTuple("Args")
_PROGRAM = Path(__file__).with_name("worker.py")


def launch(
    function: Callable[[Unpack[Args]], T],
    *args: *Args,
    workers: int = 2,
    threads: int | None = None,
    sync: Strategy | str | None = None,
    mesh: str | None = None,
    cut: WantedCuts | None = None,
    shares: str | Sequence[float] | None = None,
    name: str | None = None,
    min_workers: int | None = None,
    restarts: int = 0,
    patience: float = 600.0,
    servers: int | None = None,
    straggler: Straggler | None = None,
    backend: Backend | None = None,
    **named: Any,
) -> list[T]:
    """Start workers that each call a function, and return the results by rank.

    >>> def train(rate):
    ...     with pl.start() as run:
    ...         return run.rank * rate
    >>> pl.launch(train, 0.5, workers=2)
    [0.0, 0.5]

    Workers are fresh processes on this machine. The function and its arguments travel by value if
    workers can't import them: functions of a notebook's cells or of the main script, lambdas, and
    closures over a model. That needs cloudpickle (`pip install 'paceline[notebook]'`). Changes that
    the function makes to variables stay in the workers. In the function, `with pl.start() as run:`
    joins the workers, as in a script.

    The output of workers is shown at once, each line with the rank of its worker. A notebook shows
    it in the cell, with a bar of the run's progress. If the call is interrupted (Ctrl-C, or the
    kernel's interrupt), it ends all workers within seconds and raises `KeyboardInterrupt`.

    Args:
        function: The function.
        args: Its positional arguments.
        workers: Number of workers. Default: 2.
        threads: Threads of each worker. Default: an equal part of the cores, or OMP_NUM_THREADS.
        sync: Strategy, as an object or a string, in place of the function's own.
        mesh: Axes of the workers, in place of the function's own.
        cut: Cuts, as objects or a string, in place of the function's own.
        shares: Shares of the batch, in place of the function's own.
        name: Name of the run, in place of the function's own.
        min_workers: Continue when workers die, as long as this many remain. The list then has the
            results of the workers that finished. Default: the death of any worker ends the job.
        restarts: How often all workers start again after a failure; with `min_workers`, how many
            workers are started in place of dead ones. Default: 0.
        patience: Seconds that fewer than `min_workers` wait for more workers. Default: 600.
        servers: Number of servers of a strategy that has them.
        straggler: Policy for slow workers, in place of the function's own.
        backend: "paceline" replaces Gloo in a function that uses torch.distributed directly.
        named: Keyword arguments of the function. If `launch` has an option of the same name, give
            it by `functools.partial(train, name="x")`.

    Returns:
        The returned values, by rank.

    Raises:
        WorkerFailed: A worker failed. It has the rank and the traceback of the first one.
        UsageError: An option can't be honoured, or this process is itself a worker.
    """
    request = LaunchRequest(
        script=str(_PROGRAM),
        workers=workers,
        threads=threads,
        sync=_spell_value(sync, notation.VOCABULARY),
        mesh=mesh,
        cut=_spell_value(cut, notation.CUT_WORDS),
        shares=shares if shares is None or isinstance(shares, str) else ",".join(map(str, shares)),
        name=name,
        min_workers=min_workers,
        restarts=restarts,
        patience=patience,
        servers=servers,
        straggler=straggler,
        backend=backend,
    )
    _check_names(function, args, named)
    call: Callable[..., T] = function
    return _carry_out(partial(call, **named) if named else call, args, request)


def _check_names(
    function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Raise `UsageError` for a name that neither `launch` nor the function has."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A builtin without a signature, or an object that can't be called. `_check_request` refuses
        # the latter.
        return
    try:
        signature.bind_partial(*args, **named)
    except TypeError as error:
        launch_options = [
            option.name
            for option in inspect.signature(launch).parameters.values()
            if option.kind is option.KEYWORD_ONLY
        ]
        option_names.check_names("pl.launch", named, [*launch_options, *signature.parameters])
        raise UsageError(
            f"pl.launch can't call {getattr(function, '__name__', 'it')}{signature} so: {error}"
        ) from None


def _spell_value(value: Any, vocabulary: notation.Vocabulary) -> str | None:
    """Write a strategy or cuts as text, the form in which they travel to workers."""
    if value is None or isinstance(value, str):
        return value
    return notation.format_notation(tuple(value) if isinstance(value, list) else value, vocabulary)


def _carry_out(function: Callable[..., T], args: Sequence[Any], request: LaunchRequest) -> list[T]:
    """Start workers that call the function, and collect their results by rank."""
    _check_request(function, request)
    with ExitStack() as resources:
        # The call travels in a file without a name, whose descriptor the workers inherit.
        file = resources.enter_context(open(os.memfd_create("paceline-call", os.MFD_CLOEXEC), "wb"))
        packing.pack_call(function, args, file)
        file.flush()
        caller_end, worker_end = calls.make_channel()
        resources.callback(caller_end.close)
        outcome = _CallOutcome()
        resources.callback(outcome.close)
        # The workers' end is closed here once the launcher has inherited it.
        with worker_end:
            job = LaunchRequest(**{**vars(request), "call": (file.fileno(), worker_end.fileno())})
            launcher = LauncherProcess(
                job,
                copy_environment(),
                caller_end,
                outcome.take_message,
                timings=read_timings().call,
            )
        code = launcher.wait_for_end()
        if code:
            raise outcome.make_error(code, launcher.last_line)
        return outcome.results_by_rank(request.workers if request.min_workers is None else None)


def _check_request(function: Any, request: LaunchRequest) -> None:
    """Raise `UsageError` for a call that can't be made, with the Python names of options."""
    place = discover_place()
    if place.launcher == "paceline" or place.size > 1:
        raise UsageError(
            f"pl.launch was called in a worker, rank {place.rank} of {place.size} "
            f"({place.launcher}), and workers can't start others: call the"
            " function itself there. A module that launches while it is imported needs `if "
            "__name__ == '__main__':` before that"
        )
    if not callable(function):
        raise UsageError(
            f"pl.launch got a {type(function).__qualname__}; "
            "give a function that each worker can call"
        )
    packing.import_cloudpickle()
    if request.sync is not None or request.cut is not None:
        # Without torch in this process, `check_job` would check them in a fork of it. Forking is
        # unsafe in a process with threads, such as a notebook's kernel.
        importlib.import_module("torch")
    try:
        check_request(request)
        check_job(request)
    except UsageError as error:
        # The launcher's messages have the names of the command line: --min-workers.
        raise type(error)(
            re.sub(
                r"--([a-z]+(?:-[a-z]+)*)", lambda option: option[1].replace("-", "_"), str(error)
            )
        ) from None


class _CallOutcome:
    """The outcome of a call, from messages of the workers and their launcher.

    Statuses are shown at once.
    """

    def __init__(self) -> None:
        self._status = StatusRelay(
            NotebookBar
            if is_notebook_kernel()
            else lambda: StatusLine(choose_display(discover_place()))
        )
        self._results: dict[int, BinaryIO] = {}
        # By worker number: the exception in a line, and its traceback.
        self._failures: dict[int, tuple[str, str]] = {}
        # The number of the worker that failed first, a line on the failure, its last output.
        self._verdict: tuple[int | None, str, str] | None = None

    def take_message(self, message: CallMessage) -> None:
        """Handle a message of a worker or the launcher."""
        kind, fields, body = message
        if kind == "status":
            self._status.show_report(fields)
        elif kind == "called":
            # A worker with this number has started. Drop the messages of one that it replaces.
            self._forget_worker(fields["number"])
        elif kind == "result":
            assert body is not None
            self._results[fields["number"]] = body
        else:
            assert body is not None
            with body:
                text = body.read().decode(errors="replace")
            if kind == "failed":
                self._failures[fields["number"]] = (fields["head"], text)
            else:
                self._verdict = (fields["number"], fields["line"], text)

    def results_by_rank(self, workers: int | None) -> list[Any]:
        """Read the values that the function returned, by rank.

        Raises `WorkerFailed` if one of the `workers` sent no result.
        """
        # A worker that calls `sys.exit(0)` in a thread or `os._exit(0)` sends no result.
        silent = sorted({*range(workers or 0)} - self._results.keys())
        if silent:
            raise WorkerFailed(
                f"rank {silent[0]} ended with exit code 0 before the function had returned",
                silent[0],
            )
        return [packing.unpack_result(self._results[worker]) for worker in sorted(self._results)]

    def make_error(self, code: int, last_line: str) -> WorkerFailed:
        """Make the error of a failed call.

        `code` is the exit code of the launcher, and `last_line` its last line of output.
        """
        if self._verdict is None:
            return WorkerFailed(
                f"workers could not be started, or were ended from outside (exit code {code}); "
                f"last output of their launcher: {last_line}"
            )
        rank, line, tail = self._verdict
        # The worker's own traceback says more than its exit code.
        if rank is not None and rank in self._failures:
            head, text = self._failures[rank]
            return WorkerFailed(f"rank {rank} failed: {head}\n\n{text}", rank)
        return WorkerFailed(f"{line}; its last output was:\n\n{tail}" if tail else line, rank)

    def close(self) -> None:
        """Close the display and the files of results. Calling it twice is harmless."""
        self._status.close()
        for worker in list(self._results):
            self._forget_worker(worker)

    def _forget_worker(self, worker: int) -> None:
        self._failures.pop(worker, None)
        if worker in self._results:
            self._results.pop(worker).close()
