"""What operations leave to the end of a backward pass, and when a thread is taken to wait."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.backend import pass_thread
from paceline.comm.backend.process_group import GroupBackend
from paceline.comm.backward_pass import call_at_end_of_backward
from tests.harness.backends import meet, mine, on_shared_memory, reducing
from tests.harness.jobs import PATIENCE, wait_for

CROWDED, SPARE = 1, 2  # cores for each worker, of which one computes


def go_back(hook: Callable[[Tensor], None]) -> None:
    """Go through a backward pass that calls `hook` in the middle."""
    x = torch.ones(3, requires_grad=True)
    between = x * 2
    between.register_hook(hook)
    between.sum().backward()


def test_a_thread_that_waits_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[pass_thread.PassThread] = []
    ready, leave = threading.Event(), threading.Event()

    def wait() -> None:
        made.append(pass_thread.PassThread())
        ready.set()
        leave.wait(PATIENCE)

    other = threading.Thread(target=wait)
    other.start()
    ready.wait(PATIENCE)
    monkeypatch.setattr(pass_thread, "REST", math.inf)
    assert made[0].is_computing()
    monkeypatch.setattr(pass_thread, "REST", 0.0)
    wait_for(lambda: not made[0].is_computing())
    assert other.is_alive()
    leave.set()
    other.join(PATIENCE)
    monkeypatch.setattr(pass_thread, "REST", math.inf)
    wait_for(lambda: not made[0].is_computing())  # the kernel forgets it


def test_where_no_core_is_spare_the_thread_of_the_pass_ends_what_began_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a busy machine may let a thread rest that computes
    monkeypatch.setattr(pass_thread, "REST", math.inf)

    def body(group: GroupBackend) -> Any:
        meet(group)
        xs = [mine(group.rank(), 100_000, seed=i) for i in range(3)]
        futures: list[Any] = []
        done: list[bool] = []

        def hook(grad: Tensor) -> None:
            for x in xs:
                futures.append(
                    group.allreduce([x], reducing())
                    .get_future()
                    .then(lambda _: threading.get_ident())
                )
            call_at_end_of_backward(lambda: done.extend(future.done() for future in futures))

        go_back(hook)
        assert done == [True] * 3 and {future.wait() for future in futures} == {
            threading.get_ident()
        }
        return xs

    for found in on_shared_memory(2, body, cores=CROWDED):
        for i, x in enumerate(found):
            torch.testing.assert_close(x, mine(0, 100_000, seed=i) + mine(1, 100_000, seed=i))


def test_where_cores_are_spare_a_thread_ends_what_began_in_a_pass_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pass_thread, "REST", math.inf)

    def body(group: GroupBackend) -> Tensor:
        meet(group)
        x = mine(group.rank(), 100_000)

        def hook(grad: Tensor) -> None:
            future = group.allreduce([x], reducing()).get_future()
            wait_for(future.done)

        go_back(hook)
        return x

    assert all(
        torch.equal(x, mine(0, 100_000) + mine(1, 100_000))
        for x in on_shared_memory(2, body, cores=SPARE)
    )


def test_a_pass_that_waits_for_what_it_has_left_goes_on() -> None:
    """In C++, where nothing tells of the wait, and in Python."""

    def body(group: GroupBackend) -> Any:
        meet(group)
        waited, awaited = mine(group.rank(), 9), mine(group.rank(), 9, seed=1)
        ended = threading.Event()

        def hook(grad: Tensor) -> None:
            group.allreduce([waited], reducing()).get_future().then(lambda _: ended.set())
            assert ended.wait(PATIENCE)
            assert group.allreduce([awaited], reducing()).get_future().wait()[0] is awaited

        go_back(hook)
        return waited, awaited

    for found in on_shared_memory(2, body, cores=CROWDED):
        for i, x in enumerate(found):
            torch.testing.assert_close(x, mine(0, 9, seed=i) + mine(1, 9, seed=i))


def test_an_error_of_what_is_left_to_the_end_is_raised_by_who_waits() -> None:
    def body(group: GroupBackend) -> None:
        meet(group)
        futures: list[Any] = []
        go_back(
            lambda grad: futures.append(
                group.allreduce([torch.ones(3 + group.rank())], reducing()).get_future()
            )
        )
        with pytest.raises(Exception, match="come apart"):
            futures[0].wait()

    on_shared_memory(2, body, cores=CROWDED)
