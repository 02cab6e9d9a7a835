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
    """How one DataLoader is dealt to the workers; the same on all of them."""

    loader: DataLoader[Any]
    agreement: Agreement
    shares: Shares
    loss: Loss = "mean"
    weigh: Weigh | None = None
    train: bool | None = None  # as the caller said; None: what torch.is_grad_enabled() is at iter()
    shard: Sharding | None = None
    say: Callable[[str], None] = lambda text: None
    move: Callable[[Any], Any] | None = None  # brings a batch to the device of its worker
    training: bool = True  # as it is in the present epoch
    idle: bool = False  # nothing has been trained in this epoch so far: it may be an evaluation
    idled: bool = False  # nothing was trained in the epoch before
    pad: bool = False  # an empty share is a ghost in evaluation, too
    asked: AskedShares = None  # shares as the caller said, for the workers that there were
    costs: SampleCosts | None = None  # where samples differ, and are dealt by what they cost
    speeds: WorkerSpeeds | None = None  # of all workers, where shares are by speed
    order: SampleOrder = field(default_factory=SampleOrder)  # what samplers draw from
    looks: int = 10  # batches that are still to be looked at for labels that a mean leaves out
    _outline: Outline | None = None
    _said: set[str] = field(default_factory=set)

    @property
    def rank(self) -> int:
        """The rank of this worker, whose shares it takes."""
        return self.agreement.group.rank

    @property
    def alone(self) -> bool:
        """Whether there is one worker only."""
        return self.agreement.group.size == 1

    @property
    def ghosts(self) -> bool:
        """Whether a worker with an empty share gets the first sample as a ghost, instead of no
        rows.
        """
        return (self.training and not self.idle) or self.pad

    def outline(self) -> Outline:
        """Describe the data set as it was when this was called first: a script may change it
        later, on all workers alike.
        """
        if self._outline is None:
            self._outline = outline(self.loader.dataset)
        return self._outline

    def begin_epoch(self) -> None:
        """Find out whether the epoch that begins is for training."""
        self.training = torch.is_grad_enabled() if self.train is None else self.train

    def reshare(self, shares: AskedShares) -> None:
        """Deal by other shares."""
        self.shares = policy(shares, self.agreement.group.size)

    def regroup(self, agreement: Agreement, shares: AskedShares) -> None:
        """Deal to the workers of this agreement, by these shares."""
        self.agreement = agreement
        self.reshare(shares)

    @property
    def by_cost(self) -> bool:
        """Whether samples are dealt by what they cost."""
        return self.costs is not None and not self.alone

    @property
    def cost_kind(self) -> str:
        """How costs of samples add up, in a word."""
        return "none" if self.costs is None else "padded" if self.costs.pads else "sums"

    def deal(self, batch: Any) -> BatchDeal:
        """Deal a global batch of indices by costs, which are known."""
        assert self.costs is not None
        return deal_batch(
            self.costs.of(batch), lambda total: parts(self.shares, total), pads=self.costs.pads
        )

    def reshared(self) -> AskedShares:
        """Return the requested shares, for the present workers: ratios and speeds go with their
        workers, and newcomers get the mean.
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
                    f"shares are given by a function that doesn't know of {size} workers: "
                    "they are equal from now on"
                )
                return None
            return asked
        mean = sum(asked) / len(asked)
        return [asked[origin] if origin < len(asked) else mean for origin in self.agreement.origins]

    def follow(self, speeds: WorkerSpeeds) -> None:
        """Deal by these speeds, as they are whenever shares are dealt anew."""
        self.speeds = speeds
        self.reshare(self.reshared())

    def saved_speeds(self) -> dict[str, Any]:
        """Speeds of workers for a loader's state, if shares go by them."""
        if self.speeds is None or not self.speeds.known:
            return {}
        return {"speeds": self.speeds.state_dict(self.agreement.origins)}

    def restore_speeds(self, state: Mapping[str, Any] | None) -> None:
        """Deal by saved speeds from the next epoch on, where shares go by speed and the workers
        are as many.
        """
        if self.speeds is not None and state is not None:
            self.speeds.load_state_dict(state, self.agreement.origins)
            self.reshare(self.reshared())

    def look(self, part: SharePart) -> None:
        """Announce labels that a mean leaves out unevenly if samples are weights; for first
        batches.
        """
        self.looks -= 1
        if self.loss == "sum" or self.weigh is not None or self.alone or not part.share:
            return
        if (key := unevenly_ignored(part.batch)) is not None:
            self.looks = 0
            self.announce(
                f"labels ({key!r} of a batch) that losses ignore ({IGNORED}) "
                "are not as many in each "
                "sample, and shares count by samples: if the loss is a mean over labels, give "
                f"weigh=pl.tokens({key!r}) to run.prepare, "
                "or results depend on the number of workers"
            )

    def announce(self, text: str) -> None:
        """Announce a text, once."""
        if text not in self._said:
            self._said.add(text)
            self.say(f"paceline: {text}")


def source(shares: Sequence[int]) -> int | None:
    """Return the first worker that has samples, where another has none."""
    return next((rank for rank, share in enumerate(shares) if share), None) if 0 in shares else None


class SharePart(NamedTuple):
    """A worker's part of a global batch: `share` of `whole` samples.

    An empty share is a ghost in training, and no rows in evaluation.
    """

    whole: int
    share: int
    batch: Any
    units: float | None = None  # of work, where samples differ: the costs of the share


@dataclass(slots=True)
class GlobalBatch:
    """A global batch: its number of samples, and this worker's part, made when it is taken."""

    global_batch: int
    make: Callable[[], SharePart] | None  # None once the part was taken
    source: int | None  # as `source` says
    weight: float | None = None  # of this worker's part, where that isn't its samples
    total: float = 0.0  # of all workers
    # by rank: which rows are whose, where these don't lie in order
    rows: Sequence[Sequence[int]] | None = None

    def take(self) -> SharePart:
        """Make this worker's part, and let go of it: the caller alone holds its batch.

        Called once.
        """
        make, self.make = self.make, None
        assert make is not None, "a part is taken once"
        return make()


class Pipeline(Protocol):
    """Reads the data of one loader, share by share.

    The calls marked * are made on all workers at the same step.

    `apart`, `paused` and `place` are here as they are in lockstep.
    """

    @property
    def apart(self) -> bool:
        """Whether workers may be at different places of the epoch, so that none can call a
        collective.
        """
        return False

    @property
    def paused(self) -> bool:
        """Whether workers have come together in the middle of the epoch; `regroup` goes on."""
        return False

    def place(self, index: int) -> int:
        """Return the name of step `index` where workers compare where they are."""
        return index

    def begin(self, epoch: int, state: dict[str, Any] | None) -> int:
        """*Begin an epoch, where `state` says (None: at its start); return the first step."""
        ...

    def step(self, index: int) -> GlobalBatch | None:
        """*Return the global batch of a step, None where the epoch has ended.

        Steps are asked for in order, except after `redeal`.
        """
        ...

    def peek(self) -> Any:
        """This worker's next batch of this epoch, already read; None if there is none or it's
        unknown.
        """
        ...

    def redeal(self, index: int) -> None:
        """Discard batches that were read ahead, and deal `index` next, by the present shares.

        `index` is the last step or the one after it.
        """
        ...

    def regroup(self, index: int) -> None:
        """*Deal anew as `redeal` does, in the group that the terms have now."""
        ...

    def state(self, index: int) -> dict[str, Any]:
        """Position of the data before step `index`, the last requested one or the one after it."""
        ...

    def first(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the position before the first step of the epoch that `state` is in."""
        ...

    def next_epoch(self) -> dict[str, Any]:
        """Return the position of the data before the next epoch."""
        ...

    def end(self) -> None:
        """Release what the epoch held."""
        ...


def whole_rows(terms: LoaderSpec, item: Any) -> GlobalBatch:
    """Deal a batch that was read whole along dim 0 of its tensors."""
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
