from __future__ import annotations

import contextlib

import pytest
import torch

from paceline.cluster.store import make_local_store
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.p2p.process_pairs import PairSetting, ProcessPairs
from paceline.errors import DeadlineExceeded, ResourceError, UsageError, ViewChanged
from tests.harness import processes


def alone() -> PairSetting:
    return PairSetting(0, (5,), (0,), ("node",), 60.0, lambda word: [word], lambda: None)


def test_one_worker_sends_to_itself() -> None:
    both = ProcessPairs(alone(), torch.device("cpu"))
    x = torch.ones(3, 4)
    both.send(0, 2, {"a": 1}, [x.t()])
    x.zero_()
    message = both.receive(0, 2).wait()
    assert (
        message.head == {"a": 1}
        and torch.equal(message.tensors[0], torch.ones(4, 3))
        and message.tensors[0].is_contiguous()
    )
    assert both.traffic.within == both.traffic.between == 0
    with pytest.raises(
        DeadlineExceeded,
        match=r"rank 5 on node has not received it from rank 5 on node within 0.01 s",
    ):
        both.receive(0, 2, what="it").wait(0.01)
    with pytest.raises(UsageError, match="rank 1 is not one of"):
        both.send(1, 0, {})
    both.abort()
    with pytest.raises(ViewChanged, match="aborted by rank 5"):
        both.receive(0, 2)
    both.close()


def test_tensors_come_out_on_the_device_asked_for() -> None:
    both = ProcessPairs(alone(), torch.device("meta"))
    both.send(0, 0, {}, [torch.ones(3)])
    [x] = both.receive(0, 0).wait().tensors
    assert x.device.type == "meta" and x.shape == (3,)
    both.close()


def test_workers_that_cannot_share_memory_use_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise ResourceError("no room")

    def body(rank: int, size: int, store: object, meeting: bool) -> bool:
        group = TorchGroup.from_store(store, rank, size)  # type: ignore[arg-type]
        with contextlib.closing(group):
            setting = PairSetting(
                rank,
                (0, 1),
                (0, 0),
                ("a", "a"),
                60.0,
                lambda word: [answer.decode() for answer in group.gather_bytes(word.encode())],
                lambda: group.broken,
                meeting=group.reserve_store() if meeting else None,
            )
            both = ProcessPairs(setting, torch.device("cpu"))
            both.send(1 - rank, 0, {}, [torch.full((100,), float(rank))])
            assert both.receive(1 - rank, 0).wait().tensors[0].tolist() == [1.0 - rank] * 100
            found = both._network is not None
            group.barrier().wait()  # it has come to both
            both.close()
            return found

    assert processes.threads(2, lambda *place: body(*place, True)) == [False, False]
    monkeypatch.setattr("paceline.comm.p2p.shared_way.make_shared_segment", refuse)
    assert processes.threads(2, lambda *place: body(*place, True)) == [True, True]
    with pytest.raises(ResourceError, match="no room"):
        processes.threads(2, lambda *place: body(*place, False))


def test_nothing_more_is_sent_once_the_group_has_ended() -> None:
    group = TorchGroup.from_store(make_local_store(), 0, 1)
    both = ProcessPairs(
        PairSetting(0, (0,), (0,), ("a",), 60.0, lambda word: [word], lambda: group.broken),
        torch.device("cpu"),
    )
    work = both.receive(0, 0)
    group.end_everywhere(ViewChanged("a new view"))
    with pytest.raises(ViewChanged, match="a new view"):
        work.wait()
    with pytest.raises(ViewChanged, match="a new view"):
        both.send(0, 0, {})
    both.close()
