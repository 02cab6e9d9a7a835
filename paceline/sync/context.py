"""The surroundings of a running strategy: groups of workers, state of the step, and trace."""

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
from paceline.timings import DEFAULT_TIMINGS, Timings
from paceline.trace import Trace

NO_SAMPLES_TO_WEIGH = (
    "gradients that were added up under run.no_sync() would be lost: this worker has no samples in "
    "the turn that exchanges them, so its weight in the mean is 0; "
    "exchange them in a turn of a full batch (drop_last=True), or use AllReduce"
)


class WeighedTurn(Protocol):
    """A turn of a loader, with the weight of this worker's gradient."""

    @property
    def scale(self) -> float: ...

    @property
    def ghost(self) -> bool: ...

    @property
    def train(self) -> bool: ...


@dataclass
class StepState:
    """State of the step that strategies read; the session keeps it up to date.

    Outside of loops a worker counts as one of `group.size` equal shares. `scale` is the factor of
    the worker's gradients, and `share_of_step` its part of the samples or weights. They are equal
    if the loss is a mean; for a sum `scale` is 1. An inner loop over an evaluation changes neither.
    """

    # Last step that all workers have reached. Out of lockstep it stays the same for an epoch.
    step: int = 0
    turn: int = 0  # steps of this worker; equal to `step` in lockstep
    # Weight of this worker's gradient in the mean: weight of its share / weight of global batch.
    scale: float = 1.0
    ghost: bool = False  # this worker's share is empty: its gradients count as zeros
    # GradScalers. They multiply the loss before backward, so gradients have their scale.
    scalers: list[Any] = field(default_factory=list)
    share_of_step: float = 1.0  # this worker's part of the weights of the step, over all workers
    # A worker was lost: the rest of this turn can't be exchanged any more.
    exchange_closed: bool = False
    defer_exchange: bool = False  # this backward is not exchanged yet (no_sync)

    def set_step(self, step: int, *, apart: bool = False) -> None:
        """Set the step. `apart`: it is a step of this worker alone, out of lockstep."""
        self.turn = step
        if not apart:
            self.step = step

    def enter_turn(self, turn: WeighedTurn, share: float, *, silent: bool) -> None:
        """Enter a turn of a loader.

        Args:
            turn: The turn, with this worker's weight in it.
            share: This worker's part of the weights of the step.
            silent: Whether backward passes are not exchanged yet.
        """
        self.share_of_step, self.scale, self.ghost = share, turn.scale, turn.ghost
        self.defer_exchange = silent

    def leave_turns(self, scale: float, *, silent: bool) -> None:
        """Leave the turns of loaders: each worker has the weight `scale` from now on."""
        self.scale = self.share_of_step = scale
        self.ghost, self.defer_exchange = False, silent

    def local_factor(self, grad: Tensor, scale: float) -> float:
        """Factor that turns a gradient's weight in the global batch into one in this worker's.

        Raises:
            UsageError: This worker has no samples, but earlier turns have left it a gradient.
        """
        if self.share_of_step:
            return scale / self.share_of_step
        if scale and bool(grad.any()):
            raise UsageError(NO_SAMPLES_TO_WEIGH)
        return 0.0

    def close_exchange(self, *, closed: bool) -> None:
        """Close the exchange for the rest of this turn, or open it for the next turn."""
        self.exchange_closed = closed

    def loss_scale(self) -> float:
        """Scale of all enabled GradScalers; 1 without one.

        Codecs divide their residuals by it, as the scale may change from step to step.
        """
        enabled = [scaler for scaler in self.scalers if scaler.is_enabled()]
        scales = {float(scaler.get_scale()) for scaler in enabled}
        if len(scales) > 1:
            raise UsageError(
                f"{len(enabled)} GradScalers have come to different scales "
                f"({', '.join(f'{scale:g}' for scale in sorted(scales))}), but a codec's residuals "
                "need one scale; use one GradScaler for all optimizers, or sync without a codec"
            )
        return scales.pop() if scales else 1.0


@dataclass
class SyncContext:
    """Groups, agreement, step and trace of a running strategy.

    A run that survives losses keeps one context: `regroup` gives it the groups of the next view.
    Traffic of groups that have been left is added to the `closed_...` fields, so that totals never
    go down.
    """

    group: Group
    agreement: Agreement
    step_state: StepState = field(default_factory=StepState)
    trace: Trace = field(default_factory=Trace)
    hosts: tuple[int, ...] = ()  # host of each rank
    announce: Callable[[str], None] = print  # prints a text, each text once
    # Makes a group of all workers on torch.distributed. Collective.
    native: Callable[[], Group] | None = None
    local: Callable[[], Group] | None = None  # makes a group of this host's workers; collective
    # Starts a number of servers (None: one per host), each with a number of copies. Collective.
    # Returns `ServerEndpoints`, which `sync` can't import from `servers`.
    servers: Callable[[int | None, int], Any] | None = None
    table_servers: Callable[[int | None, int], Any] | None = None  # the same, for sparse tables
    # Starts `LocalSGD(quorum=...)`, whose rounds are kept on a server. Returns a `Sync`.
    begin_quorum: Callable[[SyncContext, Any], Any] | None = None
    deadline: float = 30.0  # seconds of a wait that is no collective call
    timings: Timings = DEFAULT_TIMINGS
    survives: bool = False  # the run continues when workers are lost
    cancel_scope: CancelScope | None = None  # is cancelled when the view of the workers changes
    # Further groups of the same workers, whose traffic and waits count too.
    extra_groups: list[Sender] = field(default_factory=list)
    # One per codec in use, in the same order on all workers.
    accounts: list[CodecAccount] = field(default_factory=list)
    # Traffic of measurements of links, which belongs to no step.
    probe_traffic: Traffic = field(default_factory=Traffic)
    # Traffic of groups that have been left, and seconds of their waits.
    closed_traffic: Traffic = field(default_factory=Traffic)
    closed_waited: float = 0.0
    # Axes of the mesh along which the model is cut. Workers along them aren't in `group`.
    cut_axes: tuple[str, ...] = ()
    # Workers that have other samples of this replica and parts of the same model. None: this
    # worker has all samples of its replica.
    sharers: Group | None = None
    meters: Sequence[AxisMeter] = ()  # meters of the exchanges along `cut_axes`
    # Listeners of `tell`, shared by all contexts of a run.
    event_listeners: list[Callable[[str], None]] = field(default_factory=list)
    # Links and cores of the measured cluster that was given to the run, to choose routes by.
    route_facts: RouteFacts | None = None
    routes: list[RouteChoice] = field(default_factory=list)  # chosen routes, each once

    def add_event_listener(self, note: Callable[[str], None]) -> None:
        """Call `note` with each text that is told, in any context of the run."""
        self.event_listeners.append(note)

    def announce_event(self, text: str) -> None:
        """Announce an event, and record it among the events of the run."""
        for note in self.event_listeners:
            note(text)
        self.announce(text)

    def sum_replica_share(self) -> float:
        """Sum up the weight of this replica's samples in the step.

        Collective among all workers that have samples of the replica.
        """
        own_share = self.step_state.share_of_step
        if self.sharers is None:
            return own_share
        return float(
            self.sharers.all_reduce(
                torch.tensor([own_share], dtype=torch.float64), name="the samples of a replica"
            ).wait()
        )

    def regroup(
        self,
        group: Group,
        hosts: tuple[int, ...],
        native: Callable[[], Group],
        cancel_scope: CancelScope,
    ) -> None:
        """Continue in the groups of a new view, as the present groups have broken.

        Args:
            group: All workers of the new view.
            hosts: Host of each rank.
            native: Makes a group on torch.distributed. Collective.
            cancel_scope: Cancelled when the new view ends.
        """
        self.leave_groups()
        self.group, self.hosts, self.native, self.cancel_scope = group, hosts, native, cancel_scope

    def record_route(self, choice: RouteChoice) -> None:
        """Record a chosen route, and announce it the first time."""
        if choice not in self.routes:
            self.routes.append(choice)
            self.announce(choice.why)

    def leave_groups(self) -> None:
        """Leave the groups, which have broken, but keep their traffic and waits in the totals."""
        self.closed_traffic, self.closed_waited = self.traffic, self.waited
        self.extra_groups = []

    @property
    def route(self) -> dict[str, Any] | None:
        """The chosen route between hosts, as plain data; None if no route was chosen."""
        return self.routes[0].to_fields() if self.routes else None

    @property
    def waited(self) -> float:
        """Seconds that this worker has waited for slower workers."""
        return (
            self.closed_waited
            + self.group.waited
            + sum(group.waited for group in self.extra_groups)
        )

    @property
    def traffic(self) -> Traffic:
        """Bytes that this worker has sent in all groups."""
        traffics = [group.traffic for group in (self.group, *self.extra_groups)]
        return self.closed_traffic + Traffic(
            sum(traffic.within for traffic in traffics),
            sum(traffic.between for traffic in traffics),
        )

    def sent_and_waited(self) -> tuple[tuple[int, int], float]:
        """Bytes sent ((within the host, between hosts), without probes) and seconds waited.

        One pass over the groups for both, as each step calls this twice.
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


def rescale_to_part(gradients: Iterable[Tensor], part: float) -> None:
    """Turn gradients weighted in the global batch into means over a part of it, in place.

    Args:
        gradients: Gradients to change.
        part: Weight of the part's samples in the global batch, 0 to 1.

    Raises:
        UsageError: The part has no samples, but earlier turns have left it gradients.
    """
    for gradient in gradients:
        if not part and bool(gradient.any()):
            raise UsageError(NO_SAMPLES_TO_WEIGH)
        gradient.div_(part) if part else gradient.zero_()
