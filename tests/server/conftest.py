"""A server in a thread, and its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.rpc import RpcClient, RpcMessage, RpcServer, keys
from paceline.server.main import Server, _warm_up
from tests.harness.shard_plans import SECONDS, packed, plan

KEYS = keys(b"0123456789abcdef", "a job")


@pytest.fixture
def call() -> Iterator[Callable[..., Any]]:
    """Workers of a server that runs in a thread: `call(worker, kind, body, *tensors)`."""
    said: list[str] = []
    _warm_up()  # as a server does before anybody waits for it
    receiver, over = RpcServer(KEYS, hosts=["127.0.0.1"], say=said.append), threading.Event()
    thread = threading.Thread(target=Server(receiver, over.is_set).run, daemon=True)
    thread.start()
    callers: dict[int, RpcClient] = {}

    def caller(worker: int) -> RpcClient:
        if worker not in callers:
            callers[worker] = RpcClient(receiver.addresses[0], KEYS, sender=worker, who="the server")
        return callers[worker]

    def act(worker: int, kind: str, body: Any = None, *tensors: Tensor) -> RpcMessage:
        return caller(worker).call(kind, body=body or {}, tensors=tensors, seconds=SECONDS)

    act.caller, act.said, act.thread = caller, said, thread  # type: ignore[attr-defined]
    yield act
    over.set()
    thread.join()
    for each in callers.values():
        each.close()
    receiver.close()


@pytest.fixture
def begun(call: Any) -> Any:
    call(0, "plan", None, packed(plan()))
    for unit, length in ((0, 16), (1, 16)):
        call(0, "fill", {"unit": unit}, torch.ones(length))
    return call
