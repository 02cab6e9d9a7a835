"""Messages of tensors between any two workers of a group, while both compute.

    rank 0                                       rank 1
    pairs.send(1, lane=0, head, [x]) ----+       pairs.receive(0, lane=0).wait()
    pairs.send(1, lane=7, head, [y]) --+ |         -> PairMessage(head, [x])
                                       | +-->
                                       +---->    messages of one source and one lane keep their
                                                 order; lanes don't hold each other up

A message arrives without the help of its sender, before or after the receiver asks for it. So no
order of sends and receives makes workers wait for each other.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.comm.group_protocol import Group, Traffic, Work
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.p2p.pair_message import PairMessage
from paceline.comm.p2p.process_pairs import PairSetting, ProcessPairs
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.solo import SoloGroup
from paceline.errors import UsageError
from paceline.native.library import has_library

__all__ = ["PairMessage", "Pairs", "connect_pairs"]


class Pairs(Protocol):
    """Messages between the workers of one group. Any thread may use them."""

    rank: int  # of this worker, 0 <= rank < size
    size: int

    @property
    def traffic(self) -> Traffic:
        """Number of bytes that this rank has sent, headers included."""
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
        """Send a message, without waiting for its receiver.

        Args:
            to: Rank of the receiver in the group.
            lane: Number of the lane, 0 to 2**62 - 1.
            head: A JSON map. Up to 1 MiB, with the shapes of the tensors.
            tensors: Dense tensors of any device, dtype and shape. Default: none.
            what: Words for the message in errors. Default: "a message on lane ...".

        Returns:
            A Work that is done when the tensors may be written to again. That does not take the
            receiver. It fails if the receiver is gone.

        Raises:
            UsageError: The head or a tensor can't be sent.
        """
        ...

    def receive(self, source: int, lane: int, *, what: str = "") -> Work[PairMessage]:
        """Receive the next message of rank `source` on a lane.

        Args:
            source: Rank of the sender in the group.
            lane: Number of the lane, as in `send`.
            what: Words for the message in errors. Default: "a message on lane ...".

        Returns:
            A Work that gives the message. Its tensors are contiguous and belong to the caller. Its
            errors, `DeadlineExceeded` and `WorkerLost`, name `what`, the rank and its host.
        """
        ...

    def close(self) -> None:
        """Leave. May be called twice.

        Workers that wait for this rank get the messages that it has sent, then `WorkerLost`.
        """
        ...

    def abort(self) -> None:
        """End every receive with an error, on this rank and on all others."""
        ...


@runtime_checkable
class MakesPairs(Protocol):
    """A group that connects its workers in pairs itself."""

    def make_pairs(self, device: torch.device) -> Pairs:
        """Connect the workers. Collective. Received tensors come out on `device`."""
        ...


def connect_pairs(
    group: Group, *, device: torch.device | str = "cpu", hostnames: Sequence[str] | None = None
) -> Pairs:
    """Connect the workers of `group` in pairs. Collective. The end of the group ends the pairs.

    Inside a host, messages go through shared memory. Between hosts they go over TCP connections,
    which begin with a proof that both sides know the job's secret.

    Args:
        group: The workers to connect.
        device: Device on which received tensors come out. Default: "cpu".
        hostnames: Name of each rank's host in errors. Default: the names of the machines.
    """
    flat = group.flat if isinstance(group, HostsGroup) else group
    # A group of another kind, such as one of threads, may have its own way.
    if isinstance(flat, MakesPairs):
        return flat.make_pairs(torch.device(device))
    # Memory is shared only if all machines have the C library: see `p2p.ring`.
    answers = group.gather_objects([platform.node(), has_library()], name="pairs")
    setting = PairSetting(
        rank=group.rank,
        names=tuple(group.global_rank(rank) for rank in range(group.size)),
        hosts=(0,) * group.size,
        hostnames=tuple(name for name, _ in answers) if hostnames is None else tuple(hostnames),
        deadline=120.0,
        meet=lambda word: [answer.decode() for answer in group.gather_bytes(word.encode())],
        broken=lambda: None,
        shares=all(able for _, able in answers),
    )
    return ProcessPairs(_complete_setting(setting, group, flat), torch.device(device))


def _complete_setting(setting: PairSetting, group: Group, flat: Group) -> PairSetting:
    """Complete the setting with the deadline, hosts and errors of this kind of group."""
    inner = group.inner if isinstance(group, HostsGroup) else flat
    # The end of either group, inside the host or between hosts, ends the pairs.
    if isinstance(inner, SharedGroup):
        watch = inner.segment.watch
        setting = replace(
            setting, deadline=watch.deadline, broken=lambda: watch.broken, busy=watch.busy
        )
    if isinstance(flat, TorchGroup):
        inner_broken = setting.broken
        return replace(
            setting,
            deadline=flat.deadline,
            hosts=flat.hosts,
            broken=lambda: flat.broken or inner_broken(),
            meeting=flat.reserve_store(),
        )
    if not isinstance(flat, SharedGroup | SoloGroup):
        raise UsageError(
            f"workers of a {type(flat).__name__} can't be connected in pairs; "
            "use a group that paceline has made"
        )
    return setting
