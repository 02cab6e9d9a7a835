"""Reads the next batch of a DataLoader, or names the reader (process) that has died."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data._utils import signal_handling

from paceline.errors import DataError

ENDED_SECONDS = 2.0  # a broken connection is seen before the end of the process behind it


def read_batch(batches: Iterator[Any], nothing: Any) -> Any:
    """Read the next batch of a DataLoader's iterator; `nothing` at its end.

    Raises `DataError` if a reader has died. An error that a data set raises in a reader is raised
    here unchanged.
    """
    try:
        return next(batches, nothing)
    except (OSError, EOFError, RuntimeError) as error:
        patient, failure = isinstance(error, ConnectionError | EOFError), None
        # Torch's handler of SIGCHLD may raise a RuntimeError at any moment, once. Then look again.
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                failure = _describe_dead_reader(batches, patient=patient)
                break
        if failure is None:
            raise
        raise DataError(failure) from error


def _describe_dead_reader(batches: Any, *, patient: bool) -> str | None:
    """Describe a reader that has died; None if none has.

    `patient`: a connection to a reader is broken, so wait until one has ended.
    """
    # Private: breaks if torch's iterator no longer has its processes in `_workers`.
    readers = list(getattr(batches, "_workers", ()))
    if patient and readers:
        # The handler of SIGCHLD raises a RuntimeError if a reader has ended.
        with contextlib.suppress(RuntimeError):
            ended = wait([reader.sentinel for reader in readers], ENDED_SECONDS)
            for reader in (reader for reader in readers if reader.sentinel in ended):
                # Its files are closed, so the process itself ends in a moment.
                reader.join(ENDED_SECONDS)
    dead = next(((index, reader) for index, reader in enumerate(readers) if reader.exitcode), None)
    if dead is None:
        return None
    _silence_signal_handler(batches)
    index, reader = dead
    name = type(getattr(batches, "_dataset", None)).__qualname__
    return (
        f"reader {index} of {len(readers)} (pid {reader.pid}) of the DataLoader over {name} "
        f"{_describe_exit(reader.exitcode)} in the middle of "
        f"an epoch. {_advise_on_exit(reader.exitcode)}"
    )


def _silence_signal_handler(batches: Any) -> None:
    """Keep torch's SIGCHLD handler from raising once more when the other readers end."""
    # Private: breaks if torch no longer lists an iterator's processes by `_worker_pids_set`.
    if getattr(batches, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
        batches._worker_pids_set = False


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _advise_on_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return (
            "The kernel sends that signal when memory runs out (see dmesg): "
            "give fewer num_workers, a smaller prefetch_factor or "
            "smaller samples; in a container, more memory"
        )
    if code == -signal.SIGBUS:
        return (
            "Shared memory ran out: give fewer num_workers or a smaller prefetch_factor, or a "
            "larger /dev/shm"
        )
    return (
        "See its own output; with num_workers=0 the same happens in this process, with a traceback"
    )
