"""Specification of a dealt loader, and the interface of the pipelines that read its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from paceline.comm.agreement import Agreement
from paceline.data.balance import SpeedShares, WorkerSpeeds
from paceline.data.batches import IGNORED_LABEL, count_rows, cut_rows, find_unevenly_ignored
from paceline.data.costs import BatchDeal, SampleCosts, deal_batch
from paceline.data.outline import Outline, outline_dataset
from paceline.data.rng import SampleOrder
from paceline.data.shares import (
    RequestedShares,
    Shares,
    fractional_shares,
    make_policy,
    share_bounds,
)

Loss = Literal["mean", "sum"]
Sharding = Literal["mine", "none"]
Weigh = Callable[[Any], float]


@dataclass
class LoaderSpec:
    """The terms on which one DataLoader is dealt to the workers; the same on all workers."""

    loader: DataLoader[Any]
    agreement: Agreement
    shares: Shares
    loss: Loss = "mean"  # reduction of the script's loss function
    weigh: Weigh | None = None  # batch -> its weight; None: its number of samples
    train: bool | None = None  # given by the caller; None: torch.is_grad_enabled() at iter()
    shard: Sharding | None = None
    say: Callable[[str], None] = lambda text: None
    move: Callable[[Any], Any] | None = None  # moves a batch to the worker's device
    training: bool = True  # in the present epoch
    idle: bool = False  # no training so far in this epoch, so it may be an evaluation
    last_epoch_idle: bool = False  # no training in the epoch before
    pad: bool = False  # an empty share is a ghost in evaluation, too
    asked: RequestedShares = None  # shares as the caller gave them, for the first workers
    costs: SampleCosts | None = None  # costs of samples, if they are dealt by cost
    speeds: WorkerSpeeds | None = None  # of all workers, if shares are by speed
    order: SampleOrder = field(default_factory=SampleOrder)  # generator of the samplers
    unchecked_batches: int = 10  # batches still to be checked for labels that a mean leaves out
    _outline: Outline | None = None
    _announced: set[str] = field(default_factory=set)

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.agreement.group.rank

    @property
    def is_alone(self) -> bool:
        """Whether there is only one worker."""
        return self.agreement.group.size == 1

    @property
    def uses_ghosts(self) -> bool:
        """Whether an empty share gets a ghost (the first sample) in place of a batch of no rows."""
        return (self.training and not self.idle) or self.pad

    def outline_data(self) -> Outline:
        """Describe the data set as it was at the first call.

        A script may change it later, on all workers alike.
        """
        if self._outline is None:
            self._outline = outline_dataset(self.loader.dataset)
        return self._outline

    def begin_epoch(self) -> None:
        """Set `training` for the epoch that begins."""
        self.training = torch.is_grad_enabled() if self.train is None else self.train

    def set_shares(self, shares: RequestedShares) -> None:
        """Deal by other shares."""
        self.shares = make_policy(shares, self.agreement.group.size)

    def regroup(self, agreement: Agreement, shares: RequestedShares) -> None:
        """Deal to other workers, by other shares."""
        self.agreement = agreement
        self.set_shares(shares)

    @property
    def deals_by_cost(self) -> bool:
        """Whether samples are dealt by cost."""
        return self.costs is not None and not self.is_alone

    @property
    def cost_kind(self) -> str:
        """Kind of costs: "none", "padded" (count x largest) or "sums"."""
        return "none" if self.costs is None else "padded" if self.costs.pads else "sums"

    def deal_by_cost(self, batch: Any) -> BatchDeal:
        """Deal a global batch of indices by costs, which must be known."""
        assert self.costs is not None
        return deal_batch(
            self.costs.costs_of(batch),
            lambda total: fractional_shares(self.shares, total),
            pads=self.costs.pads,
        )

    def shares_of_present(self) -> RequestedShares:
        """Convert the requested shares to the present workers.

        Ratios and speeds stay with their workers, and workers that have joined get the mean.
        """
        size, requested = self.agreement.group.size, self.asked
        if self.speeds is not None:
            curves = self.speeds.curves_of(
                self.agreement.origins, self.agreement.hosts or ("",) * size
            )
            return (
                "auto" if curves is None else SpeedShares(curves, per_sample=self.speeds.per_sample)
            )
        if requested is None or isinstance(requested, str) or callable(requested):
            if callable(requested) and len(requested(self.loader.batch_size or size)) != size:
                self.announce_once(
                    f"the function of shares doesn't give one share for each of the {size} "
                    "workers: shares are equal from now on"
                )
                return None
            return requested
        # Ratios are by the numbers that workers had at the start of the run.
        mean = sum(requested) / len(requested)
        return [
            requested[origin] if origin < len(requested) else mean
            for origin in self.agreement.origins
        ]

    def change_batches(self, change: Callable[[Any], Any]) -> None:
        """Pass each batch through `change`, after it was moved to the device."""
        move = self.move
        self.move = change if move is None else lambda batch: change(move(batch))

    def follow_speeds(self, speeds: WorkerSpeeds) -> None:
        """Deal by these speeds from now on, with their present values whenever shares change."""
        self.speeds = speeds
        self.set_shares(self.shares_of_present())

    def saved_speeds(self) -> dict[str, Any]:
        """State of the speeds for a checkpoint; empty if shares aren't by speed."""
        if self.speeds is None or not self.speeds.measured:
            return {}
        return {"speeds": self.speeds.state_dict(self.agreement.origins)}

    def restore_speeds(self, state: Mapping[str, Any] | None) -> None:
        """Deal by saved speeds, if shares are by speed and the number of workers is the same."""
        if self.speeds is not None and state is not None:
            self.speeds.load_state_dict(state, self.agreement.origins)
            self.set_shares(self.shares_of_present())

    def check_labels(self, part: SharePart) -> None:
        """Check one of the first batches for labels that a mean over labels leaves out unevenly.

        Announces them if batches are weighted by samples.
        """
        self.unchecked_batches -= 1
        if self.loss == "sum" or self.weigh is not None or self.is_alone or not part.share:
            return
        if (key := find_unevenly_ignored(part.batch)) is not None:
            # One announcement is enough, so no further batch is checked.
            self.unchecked_batches = 0
            self.announce_once(
                f"samples have different numbers of labels ({key!r} of a batch) that losses ignore "
                f"({IGNORED_LABEL}), and batches are weighted by samples: if the loss is a mean "
                f"over labels, give weigh=pl.tokens({key!r}) to run.prepare, or results depend on "
                "the number of workers"
            )

    def announce_once(self, text: str) -> None:
        """Announce a text, the first time it is given."""
        if text not in self._announced:
            self._announced.add(text)
            self.say(f"paceline: {text}")


def find_ghost_source(shares: Sequence[int]) -> int | None:
    """First rank with samples, if another rank has none; else None."""
    return next((rank for rank, share in enumerate(shares) if share), None) if 0 in shares else None


class SharePart(NamedTuple):
    """A worker's part of a global batch.

    The batch of an empty share is a ghost in training, and has no rows in evaluation.
    """

    whole: int  # samples of the global batch
    share: int  # samples of this worker
    batch: Any
    units: float | None = None  # cost of the share, if samples are dealt by cost


@dataclass(slots=True)
class GlobalBatch:
    """A global batch: its number of samples, and this worker's part, made when it is taken."""

    global_batch: int  # samples
    make_part: Callable[[], SharePart] | None  # makes the part; None when it has been taken
    source: int | None  # first rank with samples, if another has none
    weight: float | None = None  # of this worker's part; None: its number of samples
    total: float = 0.0  # weight of all parts together
    # Per rank: its rows in the global batch. None: shares lie one after the other.
    rows: Sequence[Sequence[int]] | None = None

    def take_part(self) -> SharePart:
        """Make this worker's part. Called once.

        Keeps no reference to it, so that its memory is free when the script drops the batch.
        """
        make, self.make_part = self.make_part, None
        assert make is not None, "a part is taken once"
        return make()


class Pipeline(Protocol):
    """Reads the data of one loader, share by share.

        begin_epoch -> deal_step, deal_step, ... -> end_epoch
                           |          ^
                           +----------+    redeal_step, regroup: other shares or other workers

    Workers in lockstep call the methods marked "Collective" at the same step. The properties and
    `common_step` are implemented here for workers in lockstep.
    """

    @property
    def is_apart(self) -> bool:
        """Whether workers may be at different steps, so that they can't make collective calls."""
        return False

    @property
    def is_paused(self) -> bool:
        """Whether workers have met in the middle of the epoch; they continue with `regroup`."""
        return False

    def common_step(self, index: int) -> int:
        """Number of step `index` that workers can compare."""
        return index

    def begin_epoch(self, epoch: int, state: dict[str, Any] | None) -> int:
        """Begin an epoch at a saved position (None: at its start); return its step. Collective."""
        ...

    def deal_step(self, index: int) -> GlobalBatch | None:
        """Deal the global batch of a step; None if the epoch has ended. Collective.

        Steps come in order, except after `redeal_step`.
        """
        ...

    def peek_batch(self) -> Any:
        """Read this worker's next batch of the epoch ahead; None if there is none or it's unknown.

        The batch isn't taken: the next step has it, too.
        """
        ...

    def redeal_step(self, index: int) -> None:
        """Discard batches that were read ahead, and deal `index` next, by the present shares.

        `index` is the last step or the one after it.
        """
        ...

    def regroup(self, index: int) -> None:
        """Deal `index` next as `redeal_step` does, to the present workers. Collective."""
        ...

    def position_at(self, index: int) -> dict[str, Any]:
        """Position of the data before step `index`, which is the last step or the one after it."""
        ...

    def epoch_start(self, state: dict[str, Any]) -> dict[str, Any]:
        """Position before the first step of the epoch of another position."""
        ...

    def next_epoch_start(self) -> dict[str, Any]:
        """Position of the data before the next epoch."""
        ...

    def end_epoch(self) -> None:
        """Release the batches and iterators of the epoch."""
        ...


def deal_rows(terms: LoaderSpec, item: Any) -> GlobalBatch:
    """Deal a batch that each worker has read whole, along dim 0 of its tensors."""
    # One worker needs no rows to cut, so any value will do.
    count = count_rows(item, missing=1 if terms.is_alone else None)
    shares = terms.shares(count)
    start, stop = share_bounds(shares)[terms.rank]

    def make() -> SharePart:
        if start == stop:
            return SharePart(count, 0, cut_rows(item, 0, 1 if terms.uses_ghosts else 0, count))
        return SharePart(
            count,
            stop - start,
            item if stop - start == count else cut_rows(item, start, stop, count),
        )

    return GlobalBatch(count, make, find_ghost_source(shares))
