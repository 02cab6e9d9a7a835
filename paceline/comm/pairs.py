"""Messages of tensors between any two workers of a group, of any shapes, while both compute.

    rank 0                                       rank 1
    pairs.send(1, lane=0, head, [x]) ----+       pairs.receive(0, lane=0).wait()   ->
                                                 PairMessage(head, [x])
    pairs.send(1, lane=7, head, [y]) --+ |
                                       | +-->    messages of one source and one lane come in the order in which they were sent;
                                       +---->    lanes don't hold each other up

A message arrives without the help of its sender, and whether or not the receiver has asked for it
yet: so no order of sends and receives makes workers wait for each other.
"""  # noqa: E501

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.comm.group import Group, Traffic, Work
from paceline.comm.hierarchy.group import HostsGroup
from paceline.comm.native.group import TorchGroup
from paceline.comm.p2p.message import PairMessage
from paceline.comm.p2p.processes import PairSetting, ProcessPairs
from paceline.comm.shm import futex
from paceline.comm.shm.group import SharedGroup
from paceline.comm.shm.segment import ORDERED_STORES
from paceline.comm.solo import SoloGroup
from paceline.errors import UsageError

__all__ = ["PairMessage", "Pairs", "pairs"]


class Pairs(Protocol):
    """Messages between the workers of one group. For any thread."""

    rank: int  # of this worker, 0 <= rank < size
    size: int

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent, headers included."""
        ...

    def send(
        self,
        to: int,
        lane: int,
        head: Mapping[str, Any],
        tensors: Sequence[Tensor] = (),
        *,
        what: str = "",
    ) -> Work[None]:
        """Send a head (JSON) and tensors of any device, dtype and shape to rank `to`, without
        waiting for it.

        The Work is done when the tensors may be written to again, which takes no receiver; its
        error tells that the receiver is gone. `what` is what errors call the message. Raises
        `UsageError` for what can't be sent.
        """
        ...

    def receive(self, source: int, lane: int, *, what: str = "") -> Work[PairMessage]:
        """Receive the next message of rank `source` on this lane; its tensors are contiguous, and
        the caller's own.

        Waits raise `DeadlineExceeded` and `WorkerLost`, which name `what`, the rank and its host.
        """
        ...

    def close(self) -> None:
        """Leave: who waits for messages of this rank gets `WorkerLost` after those that were sent.

        Calling it twice is harmless.
        """
        ...

    def abort(self) -> None:
        """End every receive with an error, here and at the others."""
        ...


@runtime_checkable
class MakesPairs(Protocol):
    """A group that connects its workers in pairs by itself."""

    def make_pairs(self, device: torch.device) -> Pairs:
        """Connect the workers. Collective. Tensors come out on `device`."""
        ...


def pairs(
    group: Group, *, device: torch.device | str = "cpu", hostnames: Sequence[str] | None = None
) -> Pairs:
    """Connect the workers of `group` in pairs.

    Collective. Tensors come out on `device`; what ends the group ends the pairs.

    `hostnames`: what errors call the host of each rank (None: as its machine calls itself). Inside
    a host messages go through shared memory, between hosts over TCP connections that begin with a
    proof of the job's secret.
    """
    flat = group.flat if isinstance(group, HostsGroup) else group
    if isinstance(flat, MakesPairs):
        return flat.make_pairs(torch.device(device))
    told = group.gather_objects(
        [platform.node(), platform.machine() in ORDERED_STORES and futex.available()], name="pairs"
    )
    setting = PairSetting(
        rank=group.rank,
        names=tuple(group.global_rank(rank) for rank in range(group.size)),
        hosts=(0,) * group.size,
        hostnames=tuple(name for name, _ in told) if hostnames is None else tuple(hostnames),
        deadline=120.0,
        meet=lambda word: [answer.decode() for answer in group.agree(word.encode())],
        broken=lambda: None,
        shares=all(able for _, able in told),
    )
    return ProcessPairs(_fitted(setting, group, flat), torch.device(device))


def _fitted(setting: PairSetting, group: Group, flat: Group) -> PairSetting:
    """Return the setting with what this kind of group knows."""
    inner = group.inner if isinstance(group, HostsGroup) else flat
    if isinstance(inner, SharedGroup):
        watch = inner.segment.watch
        setting = replace(
            setting, deadline=watch.deadline, broken=lambda: watch.broken, busy=watch.busy
        )
    if isinstance(flat, TorchGroup):
        inside = setting.broken
        return replace(
            setting,
            deadline=flat.deadline,
            hosts=flat.hosts,
            broken=lambda: flat.broken or inside(),
            meeting=flat.reserve(),
        )
    if not isinstance(flat, SharedGroup | SoloGroup):
        raise UsageError(
            f"workers of a {type(flat).__name__} can't be connected in pairs; "
            "use a group that paceline has made"
        )
    return setting
