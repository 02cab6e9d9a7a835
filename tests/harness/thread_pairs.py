"""Messages between ranks that are threads of one process, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group_protocol import FinishedWork, Traffic, Work
from paceline.comm.p2p.pair_inbox import PairInbox, ReceiveTerms, ReceiveWork
from paceline.comm.p2p.pair_message import PairMessage, copy_to_cpu, pack_header, unpack_header
from paceline.comm.traffic_meter import TrafficMeter
from paceline.errors import PacelineError, UsageError, ViewChanged, WorkerLost
from tests.harness.thread_groups import ThreadGroup


class _Exchange:
    """What the ranks of one group share: the inbox of each, and why some, or all, have ended."""

    def __init__(self, size: int) -> None:
        self.inboxes = [PairInbox() for _ in range(size)]
        self.left: set[int] = set()
        self.aborted: PacelineError | None = None

    def notify(self) -> None:
        for inbox in self.inboxes:
            inbox.wake_waiters()


class _ThreadLink:
    """The way from one rank to another."""

    def __init__(self, group: ThreadGroup, exchange: _Exchange, source: int) -> None:
        self.name, self.host = group.names[source], f"host {group.hosts[source]}"
        self._group, self._exchange, self._source = group, exchange, source

    def look_for_messages(self, *, last: bool = False) -> None: ...

    def rest_until(self, work: ReceiveWork, seconds: float) -> None:
        self._exchange.inboxes[self._group.rank].wait_for_change(work, seconds)

    def find_loss(self) -> PacelineError | None:
        if self._source in self._exchange.left:
            return WorkerLost(f"rank {self.name} has closed its end", (self.name,))
        if self._source in self._group.segment.left:
            return WorkerLost(
                f"rank {self.name} has left ({self._group.segment.left[self._source]})",
                (self.name,),
            )
        return None


class ThreadPairs:
    """Messages between the threads of a group (a `Pairs`). Collective."""

    def __init__(self, group: ThreadGroup, device: torch.device) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        me = f"rank {group.names[group.rank]} on host {group.hosts[group.rank]}"
        self._terms = ReceiveTerms(me, group.segment.deadline, device, self._broken)
        self._exchange = group.share(lambda: _Exchange(group.size))
        self._meter = TrafficMeter(group.rank, group.size, group.hosts)
        self._closed = False

    @property
    def traffic(self) -> Traffic:
        return self._meter.traffic

    def send(
        self,
        to: int,
        lane: int,
        head: Mapping[str, Any],
        tensors: Sequence[Tensor] = (),
        *,
        what: str = "",
    ) -> Work[None]:
        self._check(to)
        self._group.pause()
        text = pack_header(lane, head, tensors)
        copies = tuple(copy_to_cpu(x) for x in tensors)
        self._meter.count_sent(to, len(text) + sum(x.nbytes for x in copies))
        self._exchange.inboxes[to].put_message(
            self.rank, lane, PairMessage(unpack_header(text).head, copies)
        )
        return FinishedWork()

    def receive(self, source: int, lane: int, *, what: str = "") -> Work[PairMessage]:
        self._check(source)
        self._group.pause()
        work = ReceiveWork(
            _ThreadLink(self._group, self._exchange, source),
            what or f"a message on lane {lane}",
            self._terms,
        )
        self._exchange.inboxes[self.rank].request_message(source, lane, work)
        return work

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is not one of 0..{self.size - 1} of this group")
        error = self._broken()
        if error is not None:
            raise error

    def _broken(self) -> PacelineError | None:
        if self._closed:
            return ViewChanged("these pairs have been closed")
        error = self._exchange.aborted or self._group.segment.broken
        return (
            error if error is None or isinstance(error, PacelineError) else ViewChanged(str(error))
        )

    def close(self) -> None:
        self._closed = True
        self._exchange.left.add(self.rank)
        self._exchange.notify()

    def abort(self) -> None:
        if self._exchange.aborted is None:
            self._exchange.aborted = ViewChanged(
                f"these pairs have been aborted by rank {self._group.names[self.rank]}"
            )
        self._exchange.notify()
