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

from paceline.at_exit import call_at_exit
from paceline.cluster.store import Store
from paceline.comm.group_protocol import FinishedWork, Traffic, Work
from paceline.comm.p2p.network_way import PairNetwork
from paceline.comm.p2p.pair_inbox import PairInbox, PairLink, ReceiveTerms, ReceiveWork
from paceline.comm.p2p.pair_message import PairMessage, copy_to_cpu, pack_header, unpack_header
from paceline.comm.p2p.shared_way import ABORTED, CLOSED, SharedTable, SharedWay
from paceline.comm.traffic_meter import TrafficMeter
from paceline.errors import PacelineError, ResourceError, UsageError, ViewChanged

FAREWELL = 5.0  # seconds that a leaving worker waits until others have taken its messages
NAP = 1e-3  # seconds between two looks whether they have


class PairWay(PairLink, Protocol):
    """A link to one worker, in both directions."""

    def send(self, header: bytes, tensors: Sequence[Tensor], what: str) -> Work[None]:
        """Send a message. `what`: words for it in errors."""
        ...


@dataclass(frozen=True)
class PairSetting:
    """How the workers of a group are connected. Ranks are ranks of the group.

    rank: Rank of this worker.
    names: Rank of each worker among all workers, for errors.
    hosts: Number of each rank's host.
    hostnames: Name of each rank's host, for errors.
    deadline: Seconds that a wait for a message may take.
    meet: Gathers a word of every rank: takes this rank's, gives all, in rank order.
    broken: Gives the error that has ended the group, or None.
    busy: Called while a receive waits, to advance other operations of this process.
    shares: Whether workers of a host can share memory.
    meeting: Part of the store for addresses, and the address of this worker. None if all workers
        share memory.
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
    """Messages between the processes of a group (a `Pairs`). Making them is collective."""

    def __init__(self, setting: PairSetting, device: torch.device) -> None:
        self.rank, self.size = setting.rank, len(setting.names)
        me = f"rank {setting.names[self.rank]} on {setting.hostnames[self.rank]}"
        self._setting, self._terms = (
            setting,
            ReceiveTerms(me, setting.deadline, device, self._find_error),
        )
        self._inbox = PairInbox()
        self._meter = TrafficMeter(setting.rank, self.size, setting.hosts)
        self._meter_lock = threading.Lock()  # guards `_meter`, as any thread may send
        self._ended: PacelineError | None = None
        # Shared memory to the workers of this host, the network to all others. Without shared
        # memory the network reaches all of them.
        self._table = _make_table(setting)
        near = () if self._table is None else self._table.ranks
        self._shared = {rank: self._make_shared_way(rank) for rank in near if rank != self.rank}
        self._network = (
            self._connect_network()
            if len(set(setting.hosts)) > 1 or (self._table is None and self.size > 1)
            else None
        )
        remote = {} if self._network is None else self._network.ways
        self._ways: dict[int, PairWay] = {
            self.rank: _OwnWay(setting, self._inbox),
            **self._shared,
            **remote,
        }
        self._unregister = call_at_exit(self.close)

    def _make_shared_way(self, rank: int) -> SharedWay:
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

    def _connect_network(self) -> PairNetwork:
        setting = self._setting
        assert setting.meeting is not None
        connections = PairNetwork(
            *setting.meeting, self.rank, self._inbox, deadline=setting.deadline, busy=setting.busy
        )
        far = [rank for rank in range(self.size) if rank != self.rank and rank not in self._shared]
        connections.connect_peers({rank: setting.names[rank] for rank in far}, setting.hostnames)
        return connections

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
        way = self._find_way(to)
        # Raises before anything is sent, if the message can't be.
        header = pack_header(lane, head, tensors)
        with self._meter_lock:
            self._meter.count_sent(
                to, len(header) + sum(x.numel() * x.element_size() for x in tensors)
            )
        return way.send(header, tensors, what or f"a message on lane {lane}")

    def receive(self, source: int, lane: int, *, what: str = "") -> Work[PairMessage]:
        work = ReceiveWork(self._find_way(source), what or f"a message on lane {lane}", self._terms)
        self._inbox.request_message(source, lane, work)
        return work

    def _find_way(self, rank: int) -> PairWay:
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is not one of 0..{self.size - 1} of this group")
        error = self._find_error()
        if error is not None:
            raise copy.copy(error)
        return self._ways[rank]

    def _find_error(self) -> PacelineError | None:
        return self._ended or self._setting.broken()

    def close(self) -> None:
        if self._ended is None:
            end = time.monotonic() + (FAREWELL if self._find_error() is None else 0)
            if self._table is not None:
                self._table.mark_left(CLOSED)
            # Messages lie in memory of the sender. Wait until receivers have taken them, and take
            # messages of other workers, which may be waiting for this one in the same way.
            while any(way.has_pending for way in self._shared.values()) and time.monotonic() < end:
                for way in self._shared.values():
                    way.look_for_messages()
                time.sleep(NAP)
            self._end_pairs(ViewChanged("these pairs have been closed"), end)

    def abort(self) -> None:
        if self._ended is None:
            if self._table is not None:
                self._table.mark_left(ABORTED)
            self._end_pairs(
                ViewChanged(
                    f"these pairs have been aborted by rank {self._setting.names[self.rank]}"
                ),
                0,
            )

    def _end_pairs(self, error: PacelineError, end: float) -> None:
        self._ended = error
        self._unregister()
        if self._network is not None:
            self._network.close(end)
        for way in self._shared.values():
            way.close()
        if self._table is not None:
            self._table.close()
        self._inbox.wake_waiters()


def _make_table(setting: PairSetting) -> SharedTable | None:
    """Make the memory that workers of a host share.

    None if no host has several workers. None, too, if memory can't be shared and a network is
    there instead; without one, `ResourceError`.
    """
    if not setting.shares or len(set(setting.hosts)) == len(setting.hosts):
        return None
    ranks_here = [
        rank for rank, host in enumerate(setting.hosts) if host == setting.hosts[setting.rank]
    ]
    try:
        return SharedTable(ranks_here, setting.rank, setting.meet)
    except ResourceError:
        if setting.meeting is None:
            raise
        return None


class _OwnWay:
    """The link of a worker to itself: messages are copied into its inbox."""

    def __init__(self, setting: PairSetting, inbox: PairInbox) -> None:
        self.name, self.host = setting.names[setting.rank], setting.hostnames[setting.rank]
        self._rank, self._inbox = setting.rank, inbox

    def send(self, header: bytes, tensors: Sequence[Tensor], what: str) -> Work[None]:
        lane, head, _ = unpack_header(header)
        self._inbox.put_message(
            self._rank, lane, PairMessage(head, tuple(copy_to_cpu(x) for x in tensors))
        )
        return FinishedWork()

    def look_for_messages(self, *, last: bool = False) -> None: ...

    def rest_until(self, work: ReceiveWork, seconds: float) -> None:
        self._inbox.wait_for_change(work, seconds)

    def find_loss(self) -> PacelineError | None:
        return None
