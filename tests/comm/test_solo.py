from __future__ import annotations

import pytest
import torch

from paceline.comm.group_protocol import OPS, Group
from paceline.comm.solo import SoloGroup
from paceline.errors import Mismatch, UsageError


@pytest.fixture
def group() -> Group:
    return SoloGroup(view=3, rank=5)


def test_what_a_group_is(group: Group) -> None:
    assert (group.rank, group.size, group.view, group.global_rank(0), group.waited) == (
        0,
        1,
        3,
        5,
        0,
    )
    sub = group.make_subgroup([0])
    assert sub is not None and sub.global_rank(0) == 5 and sub.view == 3
    group.abort()
    group.close()
    group.close()


@pytest.mark.parametrize("op", OPS)
def test_a_reduction_is_a_copy(group: Group, op: str) -> None:
    x = torch.randn(4, 3).t()
    found = group.all_reduce(x, op=op).wait()  # type: ignore[arg-type]
    assert torch.equal(found, x) and found.data_ptr() != x.data_ptr() and found.is_contiguous()
    assert group.all_reduce(x, op=op, out=x).wait() is x  # type: ignore[arg-type]
    out = torch.zeros(3, 4)
    assert group.all_reduce(x, op=op, out=out).wait() is out and torch.equal(out, x)  # type: ignore[arg-type]
    assert torch.equal(group.reduce_scatter(x, op=op).wait(), x.reshape(-1))  # type: ignore[arg-type]
    assert not group.all_reduce(torch.nn.Parameter(x)).wait().requires_grad


def test_messages_to_oneself(group: Group) -> None:
    x = torch.arange(6.0).view(2, 3)
    for [found] in (group.all_gather(x).wait(), group.all_to_all([x]).wait()):
        assert torch.equal(found, x) and found.data_ptr() != x.data_ptr()
    assert group.broadcast(x).wait() is x
    group.barrier().wait()
    a, b = torch.zeros(2), torch.ones(2)
    group.exchange([(0, a), (0, b)], [(0, b), (0, a)]).wait()
    assert a.tolist() == [1, 1] and b.tolist() == [0, 0]
    assert group.gather_bytes(b"x") == [b"x"] and group.gather_objects({"a": (1, None)}) == [
        {"a": [1, None]}
    ]
    assert group.empty((2, 0, 3), torch.int8).shape == (2, 0, 3)
    assert (group.traffic.within, group.traffic.between) == (0, 0)


def test_what_would_raise_with_others_raises_alone(group: Group) -> None:
    for call in (
        lambda: group.all_reduce(torch.ones(2, dtype=torch.int32), op="mean"),
        lambda: group.all_reduce(torch.ones(2), op="median"),  # type: ignore[arg-type]
        lambda: group.all_reduce(torch.ones(2), out=torch.ones(3)),
        lambda: group.reduce_scatter(torch.ones(2, dtype=torch.bool)),
        lambda: group.all_gather(torch.eye(2).to_sparse()),
        lambda: group.broadcast(torch.ones(2), root=1),
        lambda: group.all_to_all([]),
        lambda: group.exchange([(1, torch.ones(2))], []),
        lambda: group.make_subgroup([1]),
        lambda: group.make_subgroup([]),
        lambda: group.gather_objects({1, 2}),
    ):
        with pytest.raises(UsageError):
            call()
    for recvs in ([], [(0, torch.ones(3))], [(0, torch.ones(2).double())]):
        with pytest.raises(Mismatch, match="rank 5 sends 2 x float32 to rank 5, which expects"):
            group.exchange([(0, torch.ones(2))], recvs)
