from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from paceline.cluster.store import Store
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.waitgraph import GRACE
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, ViewChanged, WorkerLost
from paceline.native.functions import load_functions
from tests.harness.jobs import wait_for
from tests.harness.processes import fork, threads

WAITS = {
    "small": lambda group: group.all_reduce(torch.ones(3)).wait(),
    "large": lambda group: group.all_reduce(torch.ones(3_000_000)).wait(),
    "agree": lambda group: group.gather_bytes(b"x"),
    "memory": lambda group: group.empty((5,), torch.float32),
}


def join(store: Store, rank: int, size: int) -> SharedGroup:
    return SharedGroup.from_store(store, rank, size, deadline=60.0)


def segment_bytes() -> int:
    return int(load_functions().segment_bytes(1))


def posts(group: SharedGroup, rank: int) -> int:
    """How often a rank has posted that it has come to something."""
    start, load = group.segment.state.base + rank * segment_bytes(), load_functions().load
    return int(load(start) + load(start + 64))


@pytest.mark.parametrize("call", WAITS)
def test_a_killed_rank_is_named_before_the_deadline(call: str) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        group.barrier().wait()
        if rank == 1:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(
            WorkerLost, match=r"rank 1 has died while rank . waits for it in"
        ) as caught:
            WAITS[call](group)
        assert caught.value.ranks == (1,)
        with pytest.raises(WorkerLost):  # and it stays so
            group.barrier().wait()
        with pytest.raises(WorkerLost):
            group.gather_bytes(b"")
        group.close()

    fork(3, body, mortal=[1])


def test_a_rank_killed_in_the_middle_of_a_sum_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        if rank == 1:
            monkeypatch.setattr(
                load_functions(), "advance", lambda _: os.kill(os.getpid(), signal.SIGKILL)
            )
        works = [group.all_reduce(torch.ones(3_000_000)) for _ in range(3)]
        for work in works:
            with pytest.raises(WorkerLost, match="rank 1 has died"):
                work.wait()
            assert work.done() and isinstance(work.exception(), WorkerLost)

    fork(2, body, mortal=[1])


@pytest.mark.parametrize("call", WAITS)
@pytest.mark.parametrize("word", ["closed", "aborted"])
def test_a_rank_that_leaves_is_named(call: str, word: str) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        group.barrier().wait()
        if rank == 0:
            time.sleep(0.02)
            group.close() if word == "closed" else group.abort()
        else:
            lost = word == "closed"
            with pytest.raises(
                WorkerLost if lost else ViewChanged,
                match="rank 0 has closed its group" if lost else "aborted by rank 0",
            ):
                WAITS[call](group)

    threads(3, body)


def test_what_had_all_its_posts_ends_though_a_rank_has_left() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        work = group.all_reduce(torch.ones(3_000_000))
        if rank == 0:
            work.wait()
            group.close()
        else:
            while not work.done():
                pass
            time.sleep(0.05)
            assert work.wait()[0] == 2

    fork(2, body)


def test_abort_ends_pending_work_here_and_is_seen_elsewhere() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        if rank == 1:
            store.take("aborted")
            with pytest.raises(ViewChanged, match="aborted by rank 0"):
                group.all_reduce(torch.ones(240_000)).wait()
                group.barrier().wait()
            return
        pending = [group.all_reduce(torch.ones(240_000)), group.barrier()]
        with pytest.raises(ViewChanged, match="aborted"):
            threading.Timer(0.05, group.abort).start()
            pending[1].wait()
        assert isinstance(pending[0].exception(), ViewChanged)
        store.put("aborted", True)
        group.abort()
        group.close()

    fork(2, body)


def test_abort_ends_a_meeting() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        if rank == 0:
            threading.Timer(0.05, group.abort).start()
            with pytest.raises(ViewChanged, match="aborted"):
                group.gather_bytes(b"")
            store.put("aborted", True)
        else:
            store.take("aborted")

    fork(2, body)


@pytest.mark.parametrize("call", ["large", "agree"])
def test_a_stopped_rank_is_named_at_the_deadline(call: str) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        store.put(f"pid{rank}", os.getpid())
        group.barrier().wait()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 0:
            # only rank 2 is missing when the deadline runs
            wait_for(lambda: posts(group, 1) > posts(group, 0))
            group.segment.watch.deadline = 0.4
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"rank 2 did not come within 0.4 s") as caught:
            WAITS[call](group)
        assert caught.value.missing == (2,) and time.monotonic() - start >= 0.4
        with pytest.raises(DeadlineExceeded):
            group.barrier().wait()
        store.put(f"named by {rank}", True)
        if rank == 0:
            store.take("named by 1")
            os.kill(store.take("pid2"), signal.SIGKILL)

    fork(3, body, mortal=[2])


def test_who_comes_after_the_deadline_hears_of_it() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        group.barrier().wait()  # all are there before the deadline runs
        group.segment.watch.deadline = 0.2
        if rank == 1:
            store.take("missed")
        with pytest.raises(
            DeadlineExceeded,
            match=r"rank 1 did not come within 0.2 s to all_reduce .*asked by rank 0",
        ) as caught:
            group.all_reduce(torch.ones(1)).wait()
            group.barrier().wait()
        assert caught.value.missing == (1,)
        if rank == 0:
            store.put("missed", True)

    fork(2, body)


def test_a_timeout_ends_only_that_wait() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        if rank == 0:
            store.take("waited")
        work = group.all_reduce(torch.full((320_000,), 1.0 + rank), name="w")
        if rank == 1:
            for _ in range(2):
                start = time.monotonic()
                with pytest.raises(
                    DeadlineExceeded,
                    match=r"rank 0 did not come within 0.05 s to all_reduce of 'w'",
                ) as caught:
                    work.wait(timeout=0.05)
                assert caught.value.missing == (0,) and time.monotonic() - start >= 0.05
            store.put("waited", True)
        assert work.wait()[0] == 3
        group.barrier().wait()
        assert group.waited > (0.1 if rank == 1 else 0)
        group.close()

    fork(2, body)


@pytest.mark.parametrize("call", ["small", "agree"])
def test_an_interrupt_is_heard_while_waiting(call: str) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        group.barrier().wait()
        if rank == 1:
            store.take("heard")
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            WAITS[call](group)
        assert time.monotonic() - start < 60  # the deadline
        store.put("heard", True)
        group.close()

    fork(2, body)


def test_an_interrupted_wait_may_be_tried_again_an_interrupted_meeting_not() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        if rank == 1:
            store.take("heard")
            assert group.all_reduce(torch.ones(240_000)).wait()[0] == 2
            with pytest.raises(WorkerLost, match=r"rank 0 broke off .*KeyboardInterrupt"):
                group.barrier().wait()
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work = group.all_reduce(torch.ones(240_000))
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            work.wait()
        store.put("heard", True)
        assert work.wait()[0] == 2
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            group.gather_bytes(b"")
        with pytest.raises(WorkerLost, match="KeyboardInterrupt"):
            group.barrier().wait()
        group.close()

    fork(2, body)


def test_ranks_that_wait_for_each_other_are_found_before_the_deadline() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        group.gather_bytes(b"")
        group.barrier().wait()
        pending = group.all_reduce(torch.ones(3)) if rank == 1 else None
        with pytest.raises(
            Mismatch, match=r"rank 0 at agree \(\S+\); ranks? [12](, 2)? at barrier of 'b' \(\S+\)"
        ):
            group.gather_bytes(b"") if rank == 0 else (
                pending or group.all_reduce(torch.ones(3))
            ) and group.barrier(name="b").wait()
        group.close()

    threads(3, body)


def test_waits_that_end_late_are_no_mismatch() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        if rank == 0:
            time.sleep(GRACE + 0.3)
        work = group.all_reduce(torch.ones(240_000))
        if rank != 0:
            group.gather_bytes(b"")
        work.wait()
        if rank == 0:
            time.sleep(0.2)
            group.gather_bytes(b"")
        group.close()

    threads(3, body)


class Unwritable(torch.Tensor):
    """A tensor that nothing can be copied to."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.copy_:
            raise RuntimeError("it can't be written")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_rank_that_fails_alone_breaks_the_group_for_all() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group = join(store, rank, size)
        with pytest.raises((RuntimeError, PacelineError)) as caught:
            out = (
                torch.zeros(480_000)[::2].as_subclass(Unwritable)
                if rank == 1
                else torch.zeros(240_000)
            )
            group.all_reduce(torch.ones(240_000), out=out).wait()
            group.barrier().wait()
        assert ("it can't be written" if rank == 1 else "rank 1 broke off") in str(caught.value)
        with pytest.raises(WorkerLost, match="rank 1"):
            group.barrier().wait()

    threads(2, body)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(60))
def test_deaths_at_any_moment(seed: int) -> None:
    def body(rank: int, size: int, store: Store) -> Any:
        group = join(store, rank, size)
        memory = group.empty((300_000,), torch.float32)
        if rank == 0:
            threading.Timer(
                0.002 * (seed % 20) + 1e-3, os.kill, (os.getpid(), signal.SIGKILL)
            ).start()
        with pytest.raises(WorkerLost, match="rank 0 has died"):
            while True:
                works = [
                    group.all_reduce(memory, out=memory),
                    group.all_reduce(torch.ones(400_000)),
                    group.all_gather(torch.ones(90_000)),
                ]
                group.gather_bytes(b"")
                for work in works:
                    work.wait()

    fork(2 + seed % 3, body, mortal=[0])
