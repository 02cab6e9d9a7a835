"""Runs a function on several real processes that meet over a store of the test's own process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore

from paceline.comm.native.torch_group import TorchGroup

CONTEXT = multiprocessing.get_context("forkserver")
BODIES = [
    "tests.comm.native.test_torch_group",
    "tests.comm.hierarchy.test_hosts_group",
    "tests.comm.p2p.test_network_way",
]
COMPARED = ["torch.distributed.tensor"]  # what `torch.testing` loads to compare
# each process would load it by itself
CONTEXT.set_forkserver_preload(["torch", *COMPARED, "torch.distributed", *BODIES])


class Crew:
    """`size` processes, each running `body(group, *arguments)`; a process that is killed has the
    result None.
    """

    def __init__(
        self,
        size: int,
        body: Callable[..., Any],
        *arguments: Any,
        deadline: float = 60.0,
        hosts: list[int] | None = None,
    ) -> None:
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            mine, theirs = CONTEXT.Pipe()
            target = (body, arguments, self.store.port, (rank, size, deadline, hosts), theirs)
            process = CONTEXT.Process(target=_work, args=target, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def heard(self, rank: int, text: str, seconds: float = 60.0) -> None:
        """Wait until `rank` has said `text` (by `say`)."""
        assert self.pipes[rank].poll(seconds), f"rank {rank} has said nothing"
        assert self.pipes[rank].recv() == ("said", text)

    def tell(self, rank: int, text: str) -> None:
        """Tell it something that it waits for (by `heard`)."""
        self.pipes[rank].send(text)

    def results(self, seconds: float = 120.0) -> list[Any]:
        """What each rank gave, once all have ended; raises what the first one raised."""
        end = time.monotonic() + seconds
        answers: list[Any] = []
        try:
            for rank, pipe in enumerate(self.pipes):
                assert pipe.poll(max(0.0, end - time.monotonic())), (
                    f"rank {rank} gave nothing within {seconds} s"
                )
                try:
                    answers.append(pipe.recv())
                except EOFError:
                    answers.append(("ended", None))
            for rank, process in enumerate(self.processes):
                process.join(max(0.1, end - time.monotonic()))
                assert not process.is_alive(), f"rank {rank} has not ended within {seconds} s"
                if process.exitcode not in (0, -signal.SIGKILL):
                    answers.append(
                        (
                            "failed",
                            f"rank {rank} has ended with {process.exitcode}: {answers[rank]}",
                        )
                    )
        finally:
            for process in self.processes:
                process.kill()
                process.join()
        failures = [what for kind, what in answers if kind == "failed"]
        assert not failures, failures[0]
        return [what for _, what in answers]


def run(
    size: int,
    body: Callable[..., Any],
    *arguments: Any,
    deadline: float = 60.0,
    hosts: list[int] | None = None,
) -> list[Any]:
    """The results of `body(group, *arguments)` on `size` processes."""
    return Crew(size, body, *arguments, deadline=deadline, hosts=hosts).results()


def say(group: TorchGroup, text: str) -> None:
    """Tell the test that this rank has come here."""
    group.pipe.send(("said", text))  # type: ignore[attr-defined]


def heard(group: TorchGroup, text: str, seconds: float = 60.0) -> None:
    """Wait until the test has told this rank so."""
    pipe = group.pipe  # type: ignore[attr-defined]
    assert pipe.poll(seconds) and pipe.recv() == text


def _work(
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    port: int,
    place: tuple[Any, ...],
    pipe: Connection,
) -> None:
    rank, size, deadline, hosts = place
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        group = TorchGroup.from_store(store, rank, size, deadline=deadline, hosts=hosts)
        group.pipe = pipe  # type: ignore[attr-defined]
        result = body(group, *arguments)
        group.close()
        pipe.send(("ended", result))
    except BaseException:
        pipe.send(("failed", f"rank {rank}: {traceback.format_exc()}"))
        raise
