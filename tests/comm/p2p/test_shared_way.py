from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from paceline.cluster.store import Store
from paceline.comm.p2p import shared_way
from paceline.comm.p2p.process_pairs import ProcessPairs
from paceline.comm.pairs import connect_pairs
from paceline.comm.shm import shared_segment
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import DeadlineExceeded, ViewChanged, WorkerLost
from tests.harness import processes
from tests.harness.jobs import PATIENCE, wait_for


def made(rank: int, size: int, store: Store) -> tuple[SharedGroup, ProcessPairs]:
    group = SharedGroup.from_store(store, rank, size, deadline=PATIENCE)
    both = connect_pairs(group, hostnames=["node"] * size)
    assert isinstance(both, ProcessPairs)
    return group, both


def test_a_killed_worker_is_named_after_its_last_messages() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        _, both = made(rank, size, store)
        if rank == 1:
            for number in range(3):
                both.send(0, 0, {}, [torch.full((30_000,), float(number))])
            both.receive(0, 9).wait()  # what came before is mapped there by now
            os.kill(os.getpid(), signal.SIGKILL)
        early = [both.receive(1, 0) for _ in range(2)]
        found = [work.wait().tensors[0] for work in early]
        both.send(1, 9, {}, [])
        found.append(both.receive(1, 0).wait().tensors[0])
        with pytest.raises(
            WorkerLost,
            match="rank 1 has died: rank 0 on node has not received the gradient of x from rank 1",
        ) as caught:
            both.receive(1, 0, what="the gradient of x").wait()
        assert caught.value.ranks == (1,)
        assert [x.tolist() == [float(number)] * 30_000 for number, x in enumerate(found)] == [
            True
        ] * 3
        both.close()

    processes.fork(2, body, mortal={1})


def test_a_message_arrives_though_its_sender_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.p2p.process_pairs.FAREWELL", PATIENCE)

    def body(rank: int, size: int, store: Store) -> None:
        group, both = made(rank, size, store)
        x = torch.full((200_000,), 1.0 + rank)
        both.send(1 - rank, 0, {"big": True}, [x])
        x.zero_()
        if rank == 1:
            both.close()  # the other has not asked yet
            store.put("closed", True)
            with pytest.raises(ViewChanged, match="closed"):
                both.receive(0, 0)
        else:
            other = both.receive(1, 7)
            # messages of all lanes are taken meanwhile
            wait_for(lambda: other.done() and store.has_keys(["closed"]))
            assert both.receive(1, 0).wait().tensors[0].sum() == 400_000
            with pytest.raises(WorkerLost, match="rank 1 has closed its end"):
                both.receive(1, 0).wait()
            error = both.send(1, 0, {}, []).exception()
            assert isinstance(error, WorkerLost) and "does not take a message on lane 0" in str(
                error
            )
            both.close()
        group.close()

    processes.fork(2, body)


def test_who_leaves_while_the_others_do_not_look_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.p2p.process_pairs.FAREWELL", 0.01)

    def body(rank: int, size: int, store: Store) -> None:
        _, both = made(rank, size, store)
        if rank == 1:
            both.send(0, 0, {}, [torch.ones(5)])
            both.close()
            store.put("closed", True)
        else:
            store.take("closed", PATIENCE)
            with pytest.raises(WorkerLost, match="messages of rank 1 can't be read"):
                both.receive(1, 0).wait()
            both.close()

    processes.fork(2, body)


def test_an_abort_ends_the_others_and_the_end_of_the_group_ends_pairs() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group, both = made(rank, size, store)
        other = connect_pairs(group)
        work, second = both.receive(1 - rank, 0), other.receive(1 - rank, 0)
        group.barrier().wait()  # both wait for what never comes
        if rank == 0:
            both.abort()
        with pytest.raises(
            ViewChanged,
            match="aborted by rank 0: rank . on node has not" if rank else "aborted by rank 0",
        ):
            work.wait()
        with pytest.raises(ViewChanged):
            both.receive(1 - rank, 0).wait()
        assert not second.done()
        with pytest.raises(DeadlineExceeded):
            second.wait(0.01)
        group.barrier().wait()
        if rank == 1:
            group.abort()
        with pytest.raises(ViewChanged, match="aborted by rank 1"):
            second.wait() if rank else group.barrier().wait()
        with pytest.raises(ViewChanged, match="aborted by rank 1"):
            other.send(1 - rank, 0, {}, [])

    processes.fork(2, body)


def test_several_threads_receive_from_one_source() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        group, both = made(rank, size, store)
        found: list[list[float]] = [[] for _ in range(4)]

        def receive(lane: int) -> None:
            for _ in range(50):
                found[lane].append(both.receive(1 - rank, lane).wait().tensors[0][-1].item())

        threads = [threading.Thread(target=receive, args=(lane,), daemon=True) for lane in range(4)]
        for thread in threads:
            thread.start()
        for number in range(50):
            for lane in (3, 1, 0, 2):
                both.send(
                    1 - rank,
                    lane,
                    {},
                    [torch.full((20_000 if lane % 2 else 2,), 100.0 * lane + number)],
                )
        for thread in threads:
            thread.join(PATIENCE)
        assert found == [[100.0 * lane + number for number in range(50)] for lane in range(4)]
        group.barrier().wait()  # all has come to both
        both.close()

    processes.fork(2, body)


def test_pairs_in_named_files_leave_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create")  # an old kernel
    for module in (shared_segment, shared_way):
        monkeypatch.setattr(module, "SHM", str(tmp_path))  # where no other test makes any

    def body(rank: int, size: int, store: Store) -> None:
        group, both = made(rank, size, store)
        for number in range(200):
            both.send(
                1 - rank,
                number % 3,
                {},
                [torch.full((40_000 if number % 50 == 0 else 5,), float(number))],
            )
        for number in range(200):
            assert both.receive(1 - rank, number % 3).wait().tensors[0][-1] == number
        group.barrier().wait()  # all has come to both
        both.close()
        group.close()

    processes.fork(2, body)
    assert os.listdir(tmp_path) == []
