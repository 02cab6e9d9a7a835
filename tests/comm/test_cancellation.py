"""Waits end from another thread."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from paceline.cluster.store import Store
from paceline.comm.cancellation import CancelScope
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import PacelineError, ViewChanged
from tests.harness.processes import fork


def test_it_trips_once_and_late_comers_at_once() -> None:
    told: list[PacelineError] = []
    cancel_scope, error = CancelScope(), ViewChanged("others")
    cancel_scope.register_end(told.append)
    cancel_scope.trip(error)
    cancel_scope.trip(ViewChanged("again"))
    cancel_scope.register_end(told.append)
    assert told == [error, error] and cancel_scope.error is error


def _waits(rank: int, size: int, store: Store, kind: str) -> None:
    cancel_scope = CancelScope()
    group = (
        SharedGroup.from_store(store, rank, size, deadline=60.0, cancel_scope=cancel_scope)
        if kind == "shared"
        else TorchGroup.from_store(
            store.torch, rank, size, deadline=60.0, cancel_scope=cancel_scope
        )
    )
    sub = group.make_subgroup(range(size))
    assert sub is not None
    group.all_reduce(torch.ones(3)).wait()
    waiting = group if kind == "shared" else sub  # groups within end, too
    if rank:
        store.take("over")  # doesn't come, and lives
        return
    threading.Timer(
        0.3, lambda: cancel_scope.trip(ViewChanged("the workers are others now"))
    ).start()
    with pytest.raises(ViewChanged, match="others now"):
        waiting.gather_bytes(b"")
    with pytest.raises(ViewChanged, match="others now"):
        group.all_reduce(torch.ones(3)).wait()
    group.close()
    store.put("over", 1)


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_a_wait_ends_before_its_deadline(kind: str) -> None:
    fork(2, partial(_waits, kind=kind))
