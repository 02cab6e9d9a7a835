"""A server in a thread, and its workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline.comm.rpc import RpcClient, RpcServer, derive_rpc_keys
from paceline.servers.process.main import Server, _warm_up_torch
from paceline.servers.protocol import message
from paceline.servers.protocol.message import Index, Request, SentRequest
from paceline.servers.protocol.parameters import FillUnit, PlanShard
from tests.harness.shard_plans import SECONDS, WAYS, packed, plan

KEYS = derive_rpc_keys(b"0123456789abcdef", "a job")


@pytest.fixture
def call() -> Iterator[Callable[..., Any]]:
    """Workers of a server that runs in a thread: `call(worker, request)`."""
    said: list[str] = []
    _warm_up_torch()  # as a server does before anybody waits for it
    receiver, over = RpcServer(KEYS, hosts=["127.0.0.1"], say=said.append), threading.Event()
    server = Server(receiver, over.is_set)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    callers: dict[int, RpcClient] = {}

    def caller(worker: int) -> RpcClient:
        if worker not in callers:
            callers[worker] = RpcClient(
                receiver.addresses[0], KEYS, sender=worker, who="the server"
            )
        return callers[worker]

    def act(worker: int, request: Request[Any]) -> Any:
        return message.call_server(caller(worker), request, SECONDS)

    def send(worker: int, request: Request[Any]) -> SentRequest[Any]:
        return message.send_request(caller(worker), request, SECONDS)

    act.caller, act.send, act.has_reported, act.thread, act.server = (
        caller,
        send,
        said,
        thread,
        server,
    )  # type: ignore[attr-defined]
    yield act
    over.set()
    thread.join()
    for each in callers.values():
        each.close()
    receiver.close()


@pytest.fixture
def begun(call: Any) -> Any:
    call(0, PlanShard(packed(plan())))
    for unit in (0, 1):
        call(0, FillUnit(Index(unit), torch.ones(16)))
    return call


@pytest.fixture
def coded(call: Any) -> Any:
    """Unit 0 has 5 elements, unit 1 has 12."""
    call(0, PlanShard(packed(plan(ways=WAYS))))
    for unit, length in ((0, 5), (1, 12)):
        call(0, FillUnit(Index(unit), torch.ones(length)))
    return call
