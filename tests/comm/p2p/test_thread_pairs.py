from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from paceline.comm.pairs import connect_pairs
from paceline.errors import DeadlineExceeded, UsageError, ViewChanged, WorkerLost
from tests.harness.jobs import PATIENCE
from tests.harness.thread_groups import ThreadGroup, spawn


def test_lanes_do_not_hold_each_other_up_and_keep_their_order() -> None:
    def body(group: ThreadGroup) -> list[Any]:
        both = connect_pairs(group)
        other = 1 - group.rank
        late = both.receive(other, 5)
        for lane in (0, 1, 0, 1):
            both.send(other, lane, {"lane": lane}, [torch.tensor([10.0 * group.rank + lane])])
        found = [both.receive(other, lane).wait().tensors[0].item() for lane in (1, 0, 1, 0)]
        assert not late.done()
        group.barrier().wait()
        both.send(other, 5, {}, [])
        assert late.wait(PATIENCE) == ({}, ())
        return found

    assert spawn(2, body) == [[11, 10, 11, 10], [1, 0, 1, 0]]


def test_a_received_tensor_is_the_receivers_own() -> None:
    def body(group: ThreadGroup) -> None:
        both, x = connect_pairs(group), torch.full((3,), float(group.rank), requires_grad=True)
        both.send(1 - group.rank, 0, {}, [x, x])
        with torch.no_grad():
            x.fill_(9)
        one, other = both.receive(1 - group.rank, 0).wait().tensors
        one.add_(5)
        assert other.tolist() == [1.0 - group.rank] * 3 and not one.requires_grad

    spawn(2, body)


def test_a_message_that_never_comes_is_named() -> None:
    met = threading.Barrier(2)

    def body(group: ThreadGroup) -> None:
        both = connect_pairs(group)
        if group.rank == 0:
            work = both.receive(1, 0, what="the output of stage 1 for micro-batch 3")
            said = (
                r"rank 0 on host 0 has not received the output of stage 1 for micro-batch 3 from "
                r"rank 1 on host 1 within 0.01 s"
            )
            with pytest.raises(DeadlineExceeded, match=said) as caught:
                work.wait(0.01)
            assert caught.value.missing == (1,)
            met.wait(PATIENCE)
            assert work.wait().head == {"late": True}  # only that wait was over
        else:
            met.wait(PATIENCE)
            both.send(0, 0, {"late": True}, [])

    spawn(2, body, hosts=(0, 1))


def test_who_has_gone_is_named_after_its_last_message() -> None:
    def body(group: ThreadGroup) -> None:
        both = connect_pairs(group)
        if group.rank == 1:
            both.send(0, 0, {}, [torch.ones(1)])
            both.close()
            with pytest.raises(ViewChanged, match="closed"):
                both.send(0, 0, {}, [])
        if group.rank == 0:
            assert both.receive(1, 0).wait().tensors[0].item() == 1
            with pytest.raises(
                WorkerLost,
                match="rank 0 on host 0 has not received a message on lane 0 from rank 1",
            ) as caught:
                both.receive(1, 0).wait()
            assert caught.value.ranks == (1,)
            with pytest.raises(WorkerLost, match="rank 2 has left"):
                both.receive(2, 0).wait()

    spawn(3, body)


def test_an_abort_ends_the_others_too() -> None:
    both_wait = threading.Barrier(2)

    def body(group: ThreadGroup) -> None:
        both = connect_pairs(group)
        work = both.receive(1 - group.rank, 3)
        both_wait.wait(PATIENCE)
        if group.rank == 0:
            both.abort()
        with pytest.raises(ViewChanged, match="aborted by rank 0"):
            work.wait(PATIENCE)
        assert isinstance(work.exception(), ViewChanged)
        with pytest.raises(ViewChanged):
            both.send(1, 0, {}, [])

    spawn(2, body)


def test_the_end_of_the_group_ends_the_pairs() -> None:
    both_wait = threading.Barrier(2)

    def body(group: ThreadGroup) -> None:
        work = connect_pairs(group).receive(1 - group.rank, 0)
        both_wait.wait(PATIENCE)
        if group.rank == 0:
            group.abort()
        with pytest.raises(ViewChanged, match="aborted"):
            work.wait(PATIENCE)

    spawn(2, body)


def test_bytes_are_counted_within_and_between_hosts() -> None:
    def body(group: ThreadGroup) -> tuple[int, int]:
        both = connect_pairs(group)
        for to in range(3):
            both.send(to, 0, {}, [torch.ones(1000 * (group.rank + 1))])
        return both.traffic.within, both.traffic.between

    counts = spawn(3, body, hosts=(0, 0, 1))
    for (within, between), wanted in zip(
        counts, [(4000, 4000), (8000, 8000), (0, 24000)], strict=True
    ):
        assert 0 <= within - wanted[0] < 200 and 0 <= between - wanted[1] < 200


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"rank 2 is not one of 0..1"):
        spawn(2, lambda group: connect_pairs(group).send(2, 0, {}, []))
    with pytest.raises(UsageError, match="rank -1"):
        spawn(2, lambda group: connect_pairs(group).receive(-1, 0))


def test_subgroups_have_pairs_with_the_names_of_all_workers() -> None:
    def body(group: ThreadGroup) -> None:
        part = group.make_subgroup([1, 2])
        if part is None:
            return
        both = connect_pairs(part)
        both.send(1 - part.rank, 0, {"from": group.rank}, [])
        assert both.receive(1 - part.rank, 0).wait().head == {"from": 3 - group.rank}
        with pytest.raises(DeadlineExceeded, match=f"from rank {3 - group.rank}"):
            both.receive(1 - part.rank, 0).wait(0.01)
        part.barrier().wait()  # neither leaves before

    spawn(3, body)
