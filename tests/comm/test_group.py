"""What every group can do, in the way that each does best."""

from __future__ import annotations

import torch

from paceline.cluster.store import Store
from paceline.comm.group import Group, gather_into
from paceline.comm.shm.group import SharedGroup
from paceline.comm.threads import spawn
from tests.harness.processes import threads


def test_what_is_gathered_lies_where_it_was_asked_for_if_the_group_can_write_there() -> None:
    def body(group: Group) -> list[bool]:
        outs = [torch.zeros(3) for _ in range(group.size)]
        found = gather_into(group, torch.full((3,), float(group.rank + 1)), outs, name="what we have").wait()
        assert torch.equal(torch.stack(found), torch.tensor([[1.0] * 3, [2.0] * 3]))
        return [x is out for x, out in zip(found, outs, strict=True)]

    def shared(rank: int, size: int, store: Store) -> list[bool]:
        group = SharedGroup.from_store(store, rank, size, deadline=20)
        found = body(group)
        group.close()
        return found

    assert threads(2, shared) == [[True, True]] * 2
    assert spawn(2, body) == [[False, False]] * 2
