"""Everything that a strategy works with: groups, the state of the step, and the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.agreement import Agreement
from paceline.comm.axis_groups import Sender
from paceline.comm.axis_meter import AxisMeter
from paceline.comm.cancellation import CancelScope
from paceline.comm.group_protocol import Group, Traffic
from paceline.errors import UsageError
from paceline.sync.codec_cost import CodecAccount
from paceline.sync.route_choice import RouteChoice, RouteFacts
from paceline.timings import DEFAULTS, Timings
from paceline.trace import Trace

UNSHARED = (
    "gradients that were added up under run.no_sync() would be lost: this worker has no samples in "
    "the turn that exchanges them, by which "
    "this strategy weighs it; let that turn be of a whole batch (drop_last=True), or use AllReduce"
)


class WeighedTurn(Protocol):
    """A turn of a loader, with what this worker's gradient counts in it."""

    @property
    def scale(self) -> float: ...

    @property
    def ghost(self) -> bool: ...

    @property
    def train(self) -> bool: ...


@dataclass
class StepState:
    """Where training is, as strategies need it; the session keeps it up to date."""

    # the last one that all workers have come to: out of lockstep it stands still for an epoch
    step: int = 0
    turn: int = 0  # the steps of this worker: the same in lockstep
    # what my gradient counts in the mean: my weight / the weight of the global batch
    scale: float = 1.0
    ghost: bool = False  # my share is empty: my gradients count as zeros
    # GradScalers, which multiply the loss before its gradients are taken
    scalers: list[Any] = field(default_factory=list)
    share_of_step: float = 1.0  # mine of the weights of the step, over all workers
    # a worker was lost: what of this turn has not been exchanged can't be any more
    exchange_closed: bool = False
    defer_exchange: bool = False  # this backward is not exchanged yet (no_sync)

    def place(self, step: int, *, apart: bool = False) -> None:
        """Stand at this step. `apart`: it is one of this worker's own, out of lockstep."""
        self.turn = step
        if not apart:
            self.step = step

    def enter(self, turn: WeighedTurn, share: float, *, silent: bool) -> None:
        """Be in a turn of a loader, with this share of the step.

        `silent`: passes are not exchanged yet.
        """
        self.share_of_step, self.scale, self.ghost = share, turn.scale, turn.ghost
        self.defer_exchange = silent

    def rest(self, scale: float, *, silent: bool) -> None:
        """Be outside of loops, where each worker counts `scale`."""
        self.scale = self.share_of_step = scale
        self.ghost, self.defer_exchange = False, silent

    def local_factor(self, grad: Tensor, scale: float) -> float:
        """Factor from a gradient's weight in the global batch to its weight among this worker's
        samples.

        Raises `UsageError` if this worker has no samples but the gradient is of earlier turns.
        """
        if self.share_of_step:
            return scale / self.share_of_step
        if scale and bool(grad.any()):
            raise UsageError(UNSHARED)
        return 0.0

    def close_exchange(self, *, closed: bool) -> None:
        """Exchange nothing more of this turn, or let the next one be exchanged."""
        self.exchange_closed = closed

    def loss_scale(self) -> float:
        """Scale of all enabled GradScalers (1 without one); residuals are kept without it."""
        known = [scaler for scaler in self.scalers if scaler.is_enabled()]
        scales = {float(scaler.get_scale()) for scaler in known}
        if len(scales) > 1:
            raise UsageError(
                f"{len(known)} GradScalers have come to different scales "
                f"({', '.join(f'{scale:g}' for scale in sorted(scales))}), "
                "so what a codec keeps of a gradient has no unit; use one GradScaler for all, or "
                "sync without a codec"
            )
        return scales.pop() if scales else 1.0


@dataclass
class SyncContext:
    """Everything a strategy works with: its group, the agreement, the step's state, and the
    trace.
    """

    group: Group
    agreement: Agreement
    step_state: StepState = field(default_factory=StepState)
    trace: Trace = field(default_factory=Trace)
    hosts: tuple[int, ...] = ()  # the host of each rank
    announce: Callable[[str], None] = print  # how announcements are made, once each
    # makes a group of all workers on torch.distributed; collective
    native: Callable[[], Group] | None = None
    local: Callable[[], Group] | None = None  # the workers of my host; collective
    # starts so many servers (None: one on each host), each so many times; collective
    # of `ServerEndpoints`, which `servers` makes and knows
    servers: Callable[[int | None, int], Any] | None = None
    table_servers: Callable[[int | None, int], Any] | None = None  # the same, of sparse tables
    deadline: float = 30.0  # seconds, of waits that are no call of all
    timings: Timings = DEFAULTS
    survives: bool = False  # the run goes on when workers are lost
    cancel_scope: CancelScope | None = None  # trips when the workers become others
    # other groups of the same workers, whose traffic and waits count too
    extra_groups: list[Sender] = field(default_factory=list)
    # of the codecs in use, the same number on all workers
    accounts: list[CodecAccount] = field(default_factory=list)
    # what was sent to measure links: no part of a step
    probe_traffic: Traffic = field(default_factory=Traffic)
    # what was sent in groups that have been left
    closed_traffic: Traffic = field(default_factory=Traffic)
    closed_waited: float = 0.0
    # of the mesh, along which workers that are not of this group hold other parts of what is
    # trained
    cut_axes: tuple[str, ...] = ()
    # the workers with other samples of this replica, whose parts are of the same model; None: this
    # one alone
    sharers: Group | None = None
    meters: Sequence[AxisMeter] = ()  # of the exchanges along those axes
    # who notes what has happened, the same of all groups of a run
    told: list[Callable[[str], None]] = field(default_factory=list)
    # links and cores of the measured cluster that the run was given, by which ways are chosen
    route_facts: RouteFacts | None = None
    routes: list[RouteChoice] = field(default_factory=list)  # that were chosen, each once

    def follow(self, note: Callable[[str], None]) -> None:
        """Call `note` with the text of each `tell`, of this context or another one of the run."""
        self.told.append(note)

    def tell(self, text: str) -> None:
        """Announce that something has happened, which is noted among the events of the run."""
        for note in self.told:
            note(text)
        self.announce(text)

    def replica_share(self) -> float:
        """Weight of this replica's samples in the step.

        Collective for all workers with parts of it.
        """
        mine = self.step_state.share_of_step
        if self.sharers is None:
            return mine
        return float(
            self.sharers.all_reduce(
                torch.tensor([mine], dtype=torch.float64), name="the samples of a replica"
            ).wait()
        )

    def regroup(
        self,
        group: Group,
        hosts: tuple[int, ...],
        native: Callable[[], Group],
        cancel_scope: CancelScope,
    ) -> None:
        """Go on in the groups of a new view, as the present ones have broken."""
        self.leave()
        self.group, self.hosts, self.native, self.cancel_scope = group, hosts, native, cancel_scope

    def choose_route(self, choice: RouteChoice) -> None:
        """Note the way that was chosen, and say so."""
        if choice not in self.routes:
            self.routes.append(choice)
            self.announce(choice.why)

    def leave(self) -> None:
        """Leave the groups, which have broken, but keep counts of what they sent."""
        self.closed_traffic, self.closed_waited = self.traffic, self.waited
        self.extra_groups = []

    @property
    def route(self) -> dict[str, Any] | None:
        """The way between hosts that was chosen, as plain data; None where none was."""
        return self.routes[0].fields() if self.routes else None

    @property
    def waited(self) -> float:
        """Seconds spent waiting for workers that came later."""
        return (
            self.closed_waited
            + self.group.waited
            + sum(group.waited for group in self.extra_groups)
        )

    @property
    def traffic(self) -> Traffic:
        """Bytes that this worker has sent in all groups."""
        found = [group.traffic for group in (self.group, *self.extra_groups)]
        return self.closed_traffic + Traffic(
            sum(t.within for t in found), sum(t.between for t in found)
        )

    def sent_and_waited(self) -> tuple[tuple[int, int], float]:
        """Bytes sent within the host and between hosts, without probes, and seconds waited.

        They come together, as each step asks twice.
        """
        closed, probed, waited = self.closed_traffic, self.probe_traffic, self.closed_waited
        within, between = closed.within - probed.within, closed.between - probed.between
        for group in (self.group, *self.extra_groups):
            traffic = group.traffic
            within, between, waited = (
                within + traffic.within,
                between + traffic.between,
                waited + group.waited,
            )
        return (within, between), waited


def among_own(gradients: Iterable[Tensor], part: float) -> None:
    """Turn gradients weighted in the global batch into means over a `part` of it.

    Raises `UsageError` if the part has no samples but the gradients are of earlier turns.
    """
    for total in gradients:
        if not part and bool(total.any()):
            raise UsageError(UNSHARED)
        total.div_(part) if part else total.zero_()
