"""The specification of a dealt loader, and the interface of pipelines that deliver its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from paceline.comm.agreement import Agreement
from paceline.data.balance import SpeedShares, WorkerSpeeds
from paceline.data.batches import IGNORED, cut, rows, unevenly_ignored
from paceline.data.costs import BatchDeal, SampleCosts, deal_batch
from paceline.data.outline import Outline, outline
from paceline.data.rng import SampleOrder
from paceline.data.shares import AskedShares, Shares, parts, policy, spans

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
    idle: bool = False  # nothing was trained in this epoch so far, so it may be an evaluation
    idled: bool = False  # nothing was trained in the epoch before
    pad: bool = False  # an empty share is a ghost in evaluation, too
    asked: AskedShares = None  # shares as the caller gave them, for the first workers
    costs: SampleCosts | None = None  # costs of samples, if they are dealt by cost
    speeds: WorkerSpeeds | None = None  # of all workers, if shares are by speed
    order: SampleOrder = field(default_factory=SampleOrder)  # generator of the samplers
    looks: int = 10  # batches still to be checked for labels that a mean leaves out
    _outline: Outline | None = None
    _said: set[str] = field(default_factory=set)

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.agreement.group.rank

    @property
    def alone(self) -> bool:
        """Whether there is only one worker."""
        return self.agreement.group.size == 1

    @property
    def ghosts(self) -> bool:
        """Whether a worker with an empty share gets a ghost (the first sample), and not no rows."""
        return (self.training and not self.idle) or self.pad

    def outline(self) -> Outline:
        """Describe the data set as it was at the first call.

        A script may change it later, on all workers alike.
        """
        if self._outline is None:
            self._outline = outline(self.loader.dataset)
        return self._outline

    def begin_epoch(self) -> None:
        """Set `training` for the epoch that begins."""
        self.training = torch.is_grad_enabled() if self.train is None else self.train

    def reshare(self, shares: AskedShares) -> None:
        """Deal by other shares."""
        self.shares = policy(shares, self.agreement.group.size)

    def regroup(self, agreement: Agreement, shares: AskedShares) -> None:
        """Deal to other workers, by other shares."""
        self.agreement = agreement
        self.reshare(shares)

    @property
    def by_cost(self) -> bool:
        """Whether samples are dealt by cost."""
        return self.costs is not None and not self.alone

    @property
    def cost_kind(self) -> str:
        """Kind of costs: "none", "padded" (count x largest) or "sums"."""
        return "none" if self.costs is None else "padded" if self.costs.pads else "sums"

    def deal(self, batch: Any) -> BatchDeal:
        """Deal a global batch of indices by costs, which must be known."""
        assert self.costs is not None
        return deal_batch(
            self.costs.of(batch), lambda total: parts(self.shares, total), pads=self.costs.pads
        )

    def reshared(self) -> AskedShares:
        """Convert the requested shares to the present workers.

        Ratios and speeds stay with their workers, and workers that have joined get the mean.
        """
        size, asked = self.agreement.group.size, self.asked
        if self.speeds is not None:
            curves = self.speeds.of(self.agreement.origins, self.agreement.hosts or ("",) * size)
            return (
                "auto" if curves is None else SpeedShares(curves, per_sample=self.speeds.per_sample)
            )
        if asked is None or isinstance(asked, str) or callable(asked):
            if callable(asked) and len(asked(self.loader.batch_size or size)) != size:
                self.announce(
                    f"the function of shares gives other than one share for each of {size} "
                    "workers: shares are equal from now on"
                )
                return None
            return asked
        mean = sum(asked) / len(asked)
        return [asked[origin] if origin < len(asked) else mean for origin in self.agreement.origins]

    def follow(self, speeds: WorkerSpeeds) -> None:
        """Deal by these speeds from now on, with their present values whenever shares change."""
        self.speeds = speeds
        self.reshare(self.reshared())

    def saved_speeds(self) -> dict[str, Any]:
        """State of the speeds for a checkpoint; empty if shares aren't by speed."""
        if self.speeds is None or not self.speeds.known:
            return {}
        return {"speeds": self.speeds.state_dict(self.agreement.origins)}

    def restore_speeds(self, state: Mapping[str, Any] | None) -> None:
        """Deal by saved speeds, if shares are by speed and there are as many workers."""
        if self.speeds is not None and state is not None:
            self.speeds.load_state_dict(state, self.agreement.origins)
            self.reshare(self.reshared())

    def look(self, part: SharePart) -> None:
        """Check one of the first batches for labels that a mean over labels leaves out unevenly.

        Announces them if batches are weighted by samples.
        """
        self.looks -= 1
        if self.loss == "sum" or self.weigh is not None or self.alone or not part.share:
            return
        if (key := unevenly_ignored(part.batch)) is not None:
            self.looks = 0
            self.announce(
                f"samples have different numbers of labels ({key!r} of a batch) that losses ignore "
                f"({IGNORED}), and shares count by samples: if the loss is a mean over labels, "
                f"give weigh=pl.tokens({key!r}) to run.prepare, or results depend on the number "
                "of workers"
            )

    def announce(self, text: str) -> None:
        """Announce a text, the first time it is given."""
        if text not in self._said:
            self._said.add(text)
            self.say(f"paceline: {text}")


def source(shares: Sequence[int]) -> int | None:
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
    make: Callable[[], SharePart] | None  # makes the part; None when it has been taken
    source: int | None  # first rank with samples, if another has none
    weight: float | None = None  # of this worker's part; None: its number of samples
    total: float = 0.0  # weight of all parts together
    # Per rank: its rows in the global batch. None: shares lie one after the other.
    rows: Sequence[Sequence[int]] | None = None

    def take(self) -> SharePart:
        """Make this worker's part. Called once.

        Keeps no reference to it, so that its memory is free when the script drops the batch.
        """
        make, self.make = self.make, None
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
    def apart(self) -> bool:
        """Whether workers may be at different steps, so that they can't make collective calls."""
        return False

    @property
    def paused(self) -> bool:
        """Whether workers have met in the middle of the epoch; they continue with `regroup`."""
        return False

    def place(self, index: int) -> int:
        """Number of step `index` that workers can compare."""
        return index

    def begin(self, epoch: int, state: dict[str, Any] | None) -> int:
        """Begin an epoch at a saved position (None: at its start); return its step. Collective."""
        ...

    def step(self, index: int) -> GlobalBatch | None:
        """Deal the global batch of a step; None if the epoch has ended. Collective.

        Steps come in order, except after `redeal_step`.
        """
        ...

    def peek(self) -> Any:
        """Read this worker's next batch of the epoch ahead; None if there is none or it's unknown.

        The batch isn't taken: the next step has it, too.
        """
        ...

    def redeal(self, index: int) -> None:
        """Discard batches that were read ahead, and deal `index` next, by the present shares.

        `index` is the last step or the one after it.
        """
        ...

    def regroup(self, index: int) -> None:
        """Deal `index` next as `redeal_step` does, to the present workers. Collective."""
        ...

    def state(self, index: int) -> dict[str, Any]:
        """Position of the data before step `index`, which is the last step or the one after it."""
        ...

    def first(self, state: dict[str, Any]) -> dict[str, Any]:
        """Position before the first step of the epoch of another position."""
        ...

    def next_epoch(self) -> dict[str, Any]:
        """Position of the data before the next epoch."""
        ...

    def end(self) -> None:
        """Release the batches and iterators of the epoch."""
        ...


def whole_rows(terms: LoaderSpec, item: Any) -> GlobalBatch:
    """Deal a batch that each worker has read whole, along dim 0 of its tensors."""
    # One worker needs no rows to cut, so any value will do.
    count = rows(item, missing=1 if terms.alone else None)
    shares = terms.shares(count)
    start, stop = spans(shares)[terms.rank]

    def make() -> SharePart:
        if start == stop:
            return SharePart(count, 0, cut(item, 0, 1 if terms.ghosts else 0, count))
        return SharePart(
            count, stop - start, item if stop - start == count else cut(item, start, stop, count)
        )

    return GlobalBatch(count, make, source(shares))
