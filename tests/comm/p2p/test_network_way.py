"""Pairs over TCP, in processes that take each other to be on other hosts."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest
import torch

from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.p2p import connection, network_way, process_pairs
from paceline.comm.p2p.connection import STRANGERS, call_worker
from paceline.comm.p2p.process_pairs import ProcessPairs
from paceline.comm.pairs import connect_pairs
from paceline.errors import DeadlineExceeded, SecretError, ViewChanged, WorkerLost
from tests.harness.jobs import PATIENCE, wait_for
from tests.harness.native_processes import run


def made(group: TorchGroup, **options: Any) -> ProcessPairs:
    both = connect_pairs(group, hostnames=[f"node{rank}" for rank in range(group.size)], **options)
    assert isinstance(both, ProcessPairs)
    return both


def _killed(group: TorchGroup) -> None:
    both = made(group)
    if group.rank == 1:
        for number in range(3):
            both.send(0, 0, {}, [torch.full((100_000,), float(number))]).wait(PATIENCE)
        both.receive(0, 9).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 0:
        found = [both.receive(1, 0).wait().tensors[0] for _ in range(3)]
        assert [x.sum().item() for x in found] == [0, 100_000, 200_000]
        silent = both.receive(2, 0)  # which has never sent anything
        both.send(1, 9, {}, [])
        said = (
            "rank 1 on node1 is gone: .*: rank 0 on node0 has not received the output of stage 1 "
            "from rank 1 on node1"
        )
        with pytest.raises(WorkerLost, match=said) as caught:
            both.receive(1, 0, what="the output of stage 1").wait()
        assert caught.value.ranks == (1,)
        wait_for(
            lambda: isinstance(both.send(1, 0, {}, [torch.ones(100_000)]).exception(), WorkerLost)
        )
        both.send(2, 0, {}, [])
        with pytest.raises(WorkerLost, match="rank 2 on node2 is gone"):
            silent.wait()
        both.close()
        os._exit(0)  # the group has lost its members
    both.receive(0, 0).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_workers_are_named_whether_or_not_they_ever_sent() -> None:
    run(3, _killed, hosts=[0, 1, 2])


def _busy(group: TorchGroup) -> None:
    both = made(group)
    x = torch.arange(5_000_000)
    work = both.send(1 - group.rank, 0, {}, [x])  # more than any socket buffer takes
    work.wait(PATIENCE)  # nobody has asked for it yet
    x.zero_()
    group.barrier().wait()
    assert torch.equal(both.receive(1 - group.rank, 0).wait().tensors[0], torch.arange(5_000_000))
    both.send(1 - group.rank, 1, {"last": True}, [x])
    both.close()  # what was sent arrives all the same
    with pytest.raises(ViewChanged, match="closed"):
        both.receive(1 - group.rank, 0)


def test_a_send_ends_though_nobody_asks() -> None:
    run(2, _busy, hosts=[0, 1])


def _late(group: TorchGroup) -> None:
    process_pairs.FAREWELL = connection.PROOF = PATIENCE
    both = made(group)
    if group.rank == 0:
        both.send(1, 4, {"n": 1}, [torch.ones(1_000_000)])
        both.close()
    group.barrier().wait()
    if group.rank == 1:
        message = both.receive(0, 4).wait()
        assert message.head == {"n": 1} and message.tensors[0].sum() == 1_000_000
        with pytest.raises(WorkerLost, match="rank 0 on node0 is gone"):
            both.receive(0, 4).wait()
        both.close()


def test_what_was_sent_arrives_after_its_sender_has_left() -> None:
    run(2, _late, hosts=[0, 1])


def _strange(group: TorchGroup) -> None:
    both = made(group)
    assert both._network is not None
    if group.rank == 0:
        [way] = both._network.ways.values()
        address = way._listening.address, way._listening.port
        for said in (b"", b"x" * 1000, network_way.__name__.encode(), os.urandom(60)):
            with socket.create_connection(address) as stranger:
                stranger.sendall(said)
        # more than may be unproved at a time
        held = [socket.create_connection(address) for _ in range(STRANGERS + 5)]
        both.send(1, 0, {"n": 1}, [torch.ones(3)])
        for stranger in held[:10]:
            stranger.close()
        assert both.receive(1, 0).wait().head == {"n": 2}
        with pytest.raises(SecretError, match="doesn't know the secret of this job"):
            call_worker(
                way._listening,
                both._network.derive_key("another"),
                (0, 1),
                who="rank 1 on node1",
                name=1,
                deadline=PATIENCE,
                check=both._network.raise_if_closed,
            )
        for stranger in held:
            stranger.close()
    else:
        message = both.receive(0, 0).wait()
        assert (message.head, message.tensors[0].tolist()) == ({"n": 1}, [1, 1, 1])
        both.send(0, 0, {"n": 2}, [])
        with pytest.raises(DeadlineExceeded):
            both.receive(0, 0).wait(0.05)  # nothing that strangers have said
    group.barrier().wait()
    both.close()


def test_strangers_send_nothing_and_keep_nobody_out() -> None:
    run(2, _strange, hosts=[0, 1])
