"""Runs one function in several processes, or threads, that meet at a store: for tests of what
processes share.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import FileStore

from paceline.cluster.store import Store, make_local_store

T = TypeVar("T")
Body = Callable[[int, int, Store], T]


def fork(
    size: int, body: Body[T], *, timeout: float = 120.0, mortal: Collection[int] = ()
) -> list[T]:
    """The results of `body(rank, size, store)` in `size` forked processes, in rank order.

    Raises the error of the first rank that has one. Who dies raises RuntimeError, but gives None if
    its rank is `mortal`. Nobody outlives `timeout` seconds.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=_run, args=(rank, size, body, path, pipes), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            answers = _collect([receiver for receiver, _ in pipes], timeout)
        finally:
            for process in processes:
                process.join(1)
                process.kill()  # a stopped one too
                process.join()
    for rank, answer in enumerate(answers):
        if answer is None and rank not in mortal:
            raise RuntimeError(
                f"rank {rank} has died with exit code {processes[rank].exitcode}, or did not end "
                f"within {timeout:g} s"
            )
        if answer is not None and answer[0] is not None:
            raise answer[0]
    return [answer[1] if answer is not None else None for answer in answers]  # type: ignore[misc]


def _run(
    rank: int, size: int, body: Body[Any], path: str, pipes: list[tuple[Connection, Connection]]
) -> None:
    gc.freeze()  # who looks for garbage in what was forked copies it
    torch.set_num_threads(1)
    for r, (receiver, sender) in enumerate(pipes):
        receiver.close()
        if r != rank:
            sender.close()
    try:
        answer = (None, body(rank, size, Store(FileStore(path, size), path="test")))
    except BaseException as error:  # noqa: BLE001  raised again by the parent
        error.add_note(f"rank {rank}: {traceback.format_exc()}")
        answer = (error, None)
    try:
        pickle.loads(pickle.dumps(answer))
    except Exception as error:  # noqa: BLE001
        answer = (RuntimeError(f"rank {rank}: {answer!r} can't be sent: {error}"), None)
    pipes[rank][1].send(answer)


def _collect(receivers: list[Connection], timeout: float) -> list[Any]:
    answers: list[Any] = [None] * len(receivers)
    pending = {receiver: rank for rank, receiver in enumerate(receivers)}
    end = time.monotonic() + timeout
    while pending and time.monotonic() < end:
        for receiver in wait(list(pending), max(0.0, end - time.monotonic())):
            assert isinstance(receiver, Connection)
            rank = pending.pop(receiver)
            try:
                answers[rank] = receiver.recv()
            except EOFError:
                continue  # it has died
    return answers


def threads(size: int, body: Body[T], *, timeout: float = 60.0) -> list[T]:
    """As `fork`, in threads of this process."""
    store = make_local_store()
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank, size, store)
        except BaseException as error:  # noqa: BLE001  raised again below
            errors[rank] = error

    crew = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in crew:
        thread.start()
    end = time.monotonic() + timeout
    for thread in crew:
        thread.join(max(0.0, end - time.monotonic()))
    for error in errors:
        if error is not None:
            raise error
    assert not any(thread.is_alive() for thread in crew), (
        f"not all of {size} ranks ended within {timeout:g} s"
    )
    return results
