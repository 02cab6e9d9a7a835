"""Messages between processes: through shared memory inside a host, over TCP between hosts."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.at_exit import at_exit
from paceline.cluster.store import Store
from paceline.comm.group import Finished, Traffic, Work
from paceline.comm.p2p.inbox import PairInbox, PairLink, ReceiveTerms, ReceiveWork
from paceline.comm.p2p.message import PairMessage, copied, pack, unpack
from paceline.comm.p2p.network import PairNetwork
from paceline.comm.p2p.shared import ABORTED, CLOSED, SharedTable, SharedWay
from paceline.comm.traffic import TrafficMeter
from paceline.errors import PacelineError, ResourceError, UsageError, ViewChanged

FAREWELL = 5.0  # seconds that a worker which leaves waits for the others to take what it has sent
NAP = 1e-3  # seconds between two looks whether they have


class PairWay(PairLink, Protocol):
    """The way to one worker, and from it."""

    def send(self, header: bytes, tensors: Sequence[Tensor], what: str) -> Work[None]:
        """Send a message; `what` is what errors call it."""
        ...


@dataclass(frozen=True)
class PairSetting:
    """What pairs are made of. Ranks count in the group.

    `names`: what the ranks are called among all workers; `hosts`, `hostnames`: the host of each.
    `meet` takes this rank's word, and gives every rank's. `broken` says why the group has ended, if
    it has; `busy` is called while a receive waits. `shares`: whether memory may be shared inside
    hosts. `meeting`: a part of the store, and the address of this worker; None where all are known
    to share memory.
    """

    rank: int
    names: tuple[int, ...]
    hosts: tuple[int, ...]
    hostnames: tuple[str, ...]
    deadline: float
    meet: Callable[[str], Sequence[str]]
    broken: Callable[[], PacelineError | None]
    busy: Callable[[], object] | None = None
    shares: bool = True
    meeting: tuple[Store, str] | None = None


class ProcessPairs:
    """Messages between the processes of a group (a `Pairs`). Collective."""

    def __init__(self, setting: PairSetting, device: torch.device) -> None:
        self.rank, self.size = setting.rank, len(setting.names)
        me = f"rank {setting.names[self.rank]} on {setting.hostnames[self.rank]}"
        self._setting, self._terms = (
            setting,
            ReceiveTerms(me, setting.deadline, device, self._broken),
        )
        self._inbox = PairInbox()
        self._meter = TrafficMeter(setting.rank, self.size, setting.hosts)
        self._counting = threading.Lock()
        self._ended: PacelineError | None = None
        self._table = _table(setting)
        near = () if self._table is None else self._table.ranks
        self._shared = {rank: self._share(rank) for rank in near if rank != self.rank}
        self._network = (
            self._connect()
            if len(set(setting.hosts)) > 1 or (self._table is None and self.size > 1)
            else None
        )
        remote = {} if self._network is None else self._network.ways
        self._ways: dict[int, PairWay] = {
            self.rank: _OwnWay(setting, self._inbox),
            **self._shared,
            **remote,
        }
        self._unregister = at_exit(self.close)

    def _share(self, rank: int) -> SharedWay:
        setting = self._setting
        assert self._table is not None
        return SharedWay(
            self._table,
            rank,
            self._inbox,
            name=setting.names[rank],
            host=setting.hostnames[rank],
            busy=setting.busy,
        )

    def _connect(self) -> PairNetwork:
        setting = self._setting
        assert setting.meeting is not None
        made = PairNetwork(
            *setting.meeting, self.rank, self._inbox, deadline=setting.deadline, busy=setting.busy
        )
        far = [rank for rank in range(self.size) if rank != self.rank and rank not in self._shared]
        made.connect({rank: setting.names[rank] for rank in far}, setting.hostnames)
        return made

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
        way = self._way(to)
        header = pack(lane, head, tensors)
        with self._counting:
            self._meter.sent(to, len(header) + sum(x.numel() * x.element_size() for x in tensors))
        return way.send(header, tensors, what or f"a message on lane {lane}")

    def receive(self, source: int, lane: int, *, what: str = "") -> Work[PairMessage]:
        work = ReceiveWork(self._way(source), what or f"a message on lane {lane}", self._terms)
        self._inbox.ask(source, lane, work)
        return work

    def _way(self, rank: int) -> PairWay:
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is not one of 0..{self.size - 1} of this group")
        error = self._broken()
        if error is not None:
            raise copy.copy(error)
        return self._ways[rank]

    def _broken(self) -> PacelineError | None:
        return self._ended or self._setting.broken()

    def close(self) -> None:
        if self._ended is None:
            end = time.monotonic() + (FAREWELL if self._broken() is None else 0)
            if self._table is not None:
                self._table.leave(CLOSED)
            while any(way.pending for way in self._shared.values()) and time.monotonic() < end:
                for way in self._shared.values():
                    way.look()  # others may wait for this worker to take what they have sent
                time.sleep(NAP)
            self._end(ViewChanged("these pairs have been closed"), end)

    def abort(self) -> None:
        if self._ended is None:
            if self._table is not None:
                self._table.leave(ABORTED)
            self._end(
                ViewChanged(
                    f"these pairs have been aborted by rank {self._setting.names[self.rank]}"
                ),
                0,
            )

    def _end(self, error: PacelineError, end: float) -> None:
        self._ended = error
        self._unregister()
        if self._network is not None:
            self._network.close(end)
        for way in self._shared.values():
            way.close()
        if self._table is not None:
            self._table.close()
        self._inbox.notify()


def _table(setting: PairSetting) -> SharedTable | None:
    """Make the memory that the workers of each host share; None where none do, or, if there is a
    network, where it can't be had.
    """
    if not setting.shares or len(set(setting.hosts)) == len(setting.hosts):
        return None
    here = [rank for rank, host in enumerate(setting.hosts) if host == setting.hosts[setting.rank]]
    try:
        return SharedTable(here, setting.rank, setting.meet)
    except ResourceError:
        if setting.meeting is None:
            raise
        return None


class _OwnWay:
    """The way from a worker to itself."""

    def __init__(self, setting: PairSetting, inbox: PairInbox) -> None:
        self.name, self.host = setting.names[setting.rank], setting.hostnames[setting.rank]
        self._rank, self._inbox = setting.rank, inbox

    def send(self, header: bytes, tensors: Sequence[Tensor], what: str) -> Work[None]:
        lane, head, _ = unpack(header)
        self._inbox.put(self._rank, lane, PairMessage(head, tuple(copied(x) for x in tensors)))
        return Finished()

    def look(self, *, last: bool = False) -> None: ...

    def rest(self, work: ReceiveWork, seconds: float) -> None:
        self._inbox.rest(work, seconds)

    def gone(self) -> PacelineError | None:
        return None
