"""The loader that a script iterates: this worker's share of each global batch.

The global batches are the same for any number of workers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgpack
from torch.utils.data import DataLoader, IterableDataset

from paceline.comm.agreement import Agreement
from paceline.comm.sample_queue import SampleQueue
from paceline.data.balance import WorkerSpeeds
from paceline.data.batch_lifetime import LentTensors, track_batch
from paceline.data.checks import check_cost, check_loader, check_speeds
from paceline.data.costs import Cost, SampleCosts
from paceline.data.dynamic import DynamicPipeline, check_out_of_lockstep
from paceline.data.indexed import IndexedPipeline
from paceline.data.outline import describe_difference
from paceline.data.rng import SampleOrder
from paceline.data.sampler import check_samplers
from paceline.data.shares import RequestedShares, make_policy, probe_policy
from paceline.data.spec import GlobalBatch, LoaderSpec, Loss, Pipeline, Sharding, SharePart, Weigh
from paceline.data.stream import StreamPipeline, check_stream
from paceline.errors import DataError

VERSION = 1


@dataclass(slots=True)
class Turn:
    """One turn of the loop body: this worker's part of a global batch."""

    index: int  # step in the epoch
    epoch: int
    global_batch: int  # samples of the step, over all workers
    share: int  # this worker's of this turn
    weight: float  # this worker's of this turn: samples, or what `weigh` says
    total: float  # the weights of the whole step, over all workers
    ghost: bool  # the batch is another's: weight 0, its gradients are to be replaced by zeros
    train: bool
    scale: float  # the factor of this worker's gradients before they are summed over workers
    source: int | None = None  # where some worker has a ghost: the first one that has samples
    units: float = 0.0  # of work in this worker's share: its samples, or what they cost
    # of each rank, in this batch: where they don't lie in order of ranks
    rows: Sequence[Sequence[int]] | None = None


class LoaderObserver(Protocol):
    """Callbacks of a loader as it moves, in the thread that iterates it.

    `prepare_epoch` comes before all workers meet for an epoch. `generation` is asked before each
    step if the membership `changes`, and counts how often it has changed: the loader deals to those
    that there are now, once all have come to the same step.
    """

    changes: bool

    def prepare_epoch(self, loader: ShareLoader) -> None: ...
    def generation(self, loader: ShareLoader) -> int: ...
    def begin_epoch(self, loader: ShareLoader) -> None: ...
    def begin_turn(self, loader: ShareLoader, turn: Turn) -> None: ...
    def end_turn(self, loader: ShareLoader) -> None: ...
    def end_epoch(self, loader: ShareLoader) -> None: ...


class NoObserver:
    """A `LoaderObserver` that does nothing."""

    changes = True  # for subclasses that say so

    def prepare_epoch(self, loader: ShareLoader) -> None:
        """Do nothing."""

    def generation(self, loader: ShareLoader) -> int:
        """Return 0: the workers stay."""
        return 0

    def begin_epoch(self, loader: ShareLoader) -> None:
        """Do nothing."""

    def begin_turn(self, loader: ShareLoader, turn: Turn) -> None:
        """Do nothing."""

    def end_turn(self, loader: ShareLoader) -> None:
        """Do nothing."""

    def end_epoch(self, loader: ShareLoader) -> None:
        """Do nothing."""


def deal_loader(
    loader: DataLoader[Any],
    agreement: Agreement,
    *,
    shares: RequestedShares = None,
    speeds: WorkerSpeeds | None = None,
    loss: Loss = "mean",
    weigh: Weigh | None = None,
    cost: Cost | None = None,
    train: bool | None = None,
    pad: bool = False,
    shard: Sharding | None = None,
    hooks: LoaderObserver | None = None,
    say: Callable[[str], None] = lambda text: None,
    move: Callable[[Any], Any] | None = None,
    sample_queue: SampleQueue | None = None,
    order: SampleOrder | None = None,
) -> ShareLoader:
    """Deal `loader`, whose batch size is that of all workers together.

    All workers call this with the same arguments.

    Args:
        shares: None (equal), one number per rank (ratios), a policy (samples of a global batch ->
            shares), or "auto": by `speeds`, as far as known.
        weigh: Function from a batch to its weight, if the loss is a mean over something else than
            samples.
        cost: Function from a sample to its cost. Sums of costs are in proportion to shares.
        train: Whether the loader is for training. None: `torch.is_grad_enabled()` at iter().
        pad: Whether an empty share is a ghost (the first sample of the batch) in evaluation, too,
            and not a batch of no rows.
        shard: "mine" for a stream that gives each rank its own samples; else each worker reads all.
        say: Called, once each, with surprising costs.
        move: Brings each batch to a device.
        sample_queue: Queue from which workers out of lockstep take samples to train on.
        order: Sample order that several loaders share.

    Raises:
        DataError: The loader can't be dealt: a DistributedSampler, a stream that shards itself, no
            length, no batch.
    """
    check_loader(loader, loss, weigh)
    dealt = make_policy(shares, agreement.group.size)
    options: dict[str, Any] = {
        "train": train,
        "pad": pad,
        "shard": shard,
        "say": say,
        "move": move,
        "order": order or SampleOrder(),
    }
    terms = LoaderSpec(loader, agreement, dealt, loss=loss, weigh=weigh, asked=shares, **options)
    if not agreement.is_alone:
        terms.outline_data()
    if cost is not None:
        check_cost(loader, cost, lockstep=sample_queue is None or train is False)
        terms.costs = SampleCosts(cost, loader.dataset)
    if shares == "auto":
        check_speeds(shard, lockstep=sample_queue is None or train is False)
        terms.follow_speeds(WorkerSpeeds() if speeds is None else speeds)
    if sample_queue is not None and train is not False:
        check_out_of_lockstep(terms)
    if isinstance(loader.dataset, IterableDataset):
        check_stream(terms)
        return ShareLoader(terms, StreamPipeline(terms), hooks or NoObserver())
    if shard is not None:
        raise DataError(
            f"shard={shard!r} is for streams, not for a {type(loader.dataset).__qualname__}: "
            "leave it out"
        )
    check_samplers(loader)
    return ShareLoader(
        terms,
        IndexedPipeline(terms) if sample_queue is None else DynamicPipeline(terms, sample_queue),
        hooks or NoObserver(),
    )


class ShareLoader:
    """An iterable over this worker's share of each global batch.

    Everything else (`dataset`, `batch_size`, ...) is that of the user's DataLoader. A step of
    `len()` is one global batch. `turn` is the present turn.
    """

    def __init__(self, terms: LoaderSpec, pipeline: Pipeline, hooks: LoaderObserver) -> None:
        self.terms = terms
        self.hooks = hooks
        self.turn: Turn | None = None
        # with the batch of the last turn of training, where there are several workers
        self.lent_batch: LentTensors = []
        self.epoch = 0  # the one under way, or the next
        self._pipeline = pipeline
        self._index = 0  # the step under way, or the next
        self.ran_through = False  # the last epoch was not left by `break`
        self._round = 0  # counts iter()
        self._open = False  # between the first batch of an epoch and its end
        self._repeats = False  # the present step is to be dealt again
        self._stale = False  # what was read ahead is dealt by outdated shares
        self._ending = False  # no further step of this epoch is wanted
        self._resumed: dict[str, Any] | None = None
        self._left_out = False  # the next iter() gives nothing
        self._generation = 0  # of the workers that are dealt to

    def __len__(self) -> int:
        if self.terms.shard == "mine" and not self.terms.is_alone:
            raise TypeError(
                "the length of a stream that shards itself by rank is not known: "
                "no worker knows the others' parts"
            )
        return len(self.terms.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "terms":  # not there yet: a copy or a pickle is being made
            raise AttributeError(name)
        return getattr(self.terms.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self._end_iteration()
        self._round += 1
        if self._left_out:
            self._left_out = False
            return iter(())
        terms = self.terms
        terms.begin_epoch()
        self.hooks.prepare_epoch(self)
        if terms.agreement.recovery is not None:
            terms.outline_data()  # of one worker alone, too: others may join later
        if (now := self.hooks.generation(self)) != self._generation:
            self._generation = now
            terms.set_shares(terms.shares_of_present())
        state, self._resumed = self._resumed, None
        _compare_terms(
            self.terms, "epoch", self._list_position(0 if state is None else state["step"])
        )
        self._index = self._pipeline.begin_epoch(self.epoch, state)
        self._open = True
        self.hooks.begin_epoch(self)
        return self._deal_epoch(self._round)

    @property
    def length(self) -> int | None:
        """The result of `len()`, None where it isn't known."""
        try:
            return len(self)
        except (TypeError, NotImplementedError):
            # what a sampler or a stream without a length raises
            return None

    @property
    def under_way(self) -> bool:
        """Whether an epoch has begun that has not ended, nor been left by `break`."""
        return self._open

    def reshare(self, shares: RequestedShares) -> None:
        """Deal by other shares from the next step on (from this one, with `again`).

        All workers call it in the same turn.
        """
        self.terms.set_shares(shares)
        _compare_terms(self.terms, "shares", [])
        self._stale = self._open
        if self.turn is None:
            self._deal_again_if_stale()

    def repeat_turn(self, shares: RequestedShares = None) -> None:
        """Deal the present global batch again after this turn, by `shares` if they are given.

        All workers call it in the same turn. If the loop was left by `break`, the epoch has ended,
        and nothing comes again.
        """
        if self.turn is None:
            raise DataError(
                "again() repeats a global batch, and none is under way: "
                "call it inside the loop over the loader"
            )
        if shares is not None:
            self.reshare(shares)
        self._repeats = self._open

    def regroup(self, agreement: Agreement, shares: RequestedShares = None) -> None:
        """Go on with other workers: deal the present global batch again, in the group of
        `agreement`.

        All workers of that group call this.
        """
        self.terms.regroup(agreement, shares)
        facts = self._list_position(self._pipeline.common_step(self._index))
        # as a worker that joins in the middle of an epoch does
        _compare_terms(self.terms, "epoch", facts)
        if self._open:
            self._repeats = self.turn is not None
            self._pipeline.regroup(self._index)

    def _list_position(self, step: int) -> list[Any]:
        return [self.epoch, step, self.terms.training]

    def _follow_membership(self) -> bool:
        """Deal to the present workers; whether they have changed."""
        changed = False
        while (now := self.hooks.generation(self)) != self._generation:
            if self._pipeline.is_apart:
                self._generation = now
                self.terms.set_shares(self.terms.shares_of_present())
                continue
            self._generation, changed = now, True
            self._repeats = self._stale = False
            self.regroup(self.terms.agreement, self.terms.shares_of_present())
        return changed

    def peek(self) -> Any:
        """This worker's part of the next batch, for early use in the loop body.

        It is returned as it was read, and stays the next batch.
        """
        return (
            self._pipeline.peek_batch()
            if self._open and self.turn is not None and not self._ending
            else None
        )

    def finish_epoch(self) -> None:
        """End the epoch after the present turn; all workers call it in the same turn."""
        self._ending = self._open

    def state_dict(self, *, redo: bool = False) -> dict[str, Any]:
        """Return the position of this loader, the same on every worker: numbers, text and tensors.

        Inside the loop body the present step counts as done; `redo=True` if it is to be done again.
        """
        head = {
            "version": VERSION,
            "stream": isinstance(self._pipeline, StreamPipeline),
            "epoch": self.epoch,
            **self.terms.saved_speeds(),
        }
        if not self._open:
            return {**head, **(self._resumed or self._pipeline.next_epoch_start())}
        done = self.turn is not None and not redo and not self._repeats
        return {
            **head,
            "training": self.terms.training,
            **self._pipeline.position_at(self._index + 1 if done else self._index),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to the place of `state_dict`, with any number of workers; the next iter() goes
        on.
        """
        if state.get("version") != VERSION or state["stream"] != isinstance(
            self._pipeline, StreamPipeline
        ):
            kinds = ("a map-style data set", "a stream")
            raise DataError(
                f"the state of a loader (version {state.get('version')}, of "
                f"{kinds[bool(state.get('stream'))]}) does not fit this one "
                f"(version {VERSION}, of {kinds[isinstance(self._pipeline, StreamPipeline)]}): "
                "load it into the loader that it was saved from"
            )
        self._end_epoch()
        self.turn = None
        self._round += 1
        self.epoch = int(state["epoch"])
        self.terms.restore_speeds(state.get("speeds"))
        self._resumed = {
            key: value
            for key, value in state.items()
            if key not in {"version", "stream", "epoch", "speeds"}
        }

    def skip_next_epoch(self, through: bool) -> None:
        """Give nothing at the next iter(): the script has come to a loop that has ended in this
        epoch.
        """
        self._left_out = through

    def restart_evaluation(self) -> None:
        """Restart an evaluation that the loaded state has half done.

        The loop over its first samples is gone.
        """
        if self._resumed is not None and not self._resumed.get("training", True):
            self._resumed = self._pipeline.epoch_start(self._resumed)

    def _deal_epoch(self, round_begun: int) -> Iterator[Any]:
        terms = self.terms
        try:
            while (step := self._next_global_batch()) is not None:
                turn, held = self._make_turn(step)
                self.turn = turn
                self.hooks.begin_turn(self, turn)
                if terms.move is not None:
                    held[0] = terms.move(held[0])
                if turn.train and terms.agreement.group.size > 1:
                    self.lent_batch = track_batch(held[0])
                yield held.pop()  # held by the script alone from here on
                if round_begun != self._round:
                    raise DataError(
                        "a newer iter() of this loader has ended this one: "
                        "a loader has one position"
                    )
                self.hooks.end_turn(self)
                if self._repeats or self._stale:
                    self._move_on()
                else:
                    self.turn = None
                    self._index += 1
            self._end_iteration()
        finally:
            if round_begun == self._round:
                self._end_epoch()

    def _next_global_batch(self) -> GlobalBatch | None:
        changes = self.hooks.changes
        if changes:
            self._follow_membership()
        while True:
            step = None if self._ending else self._pipeline.deal_step(self._index)
            step = step if step is None or self.terms.weigh is None else self._weigh_batch(step)
            if step is None and self._pipeline.is_paused:
                # where all come together, and others are let in
                self._generation = self.hooks.generation(self)
                self.regroup(self.terms.agreement, self.terms.shares_of_present())
            elif not (changes and self._follow_membership()):  # no worker was lost meanwhile
                return step

    def _move_on(self) -> None:
        """Move to the next step, or to the present one again."""
        self.turn = None
        if not self._repeats:
            self._index += 1
        self._stale = self._stale or self._repeats
        self._repeats = False
        self._deal_again_if_stale()

    def _deal_again_if_stale(self) -> None:
        if self._stale:
            self._stale = False
            self._pipeline.redeal_step(self._index)

    def _end_iteration(self) -> None:
        """Tell the observer of the end of an epoch that was run through or broken off."""
        ended = self._open or self.turn is not None
        self.ran_through = self._open and self.turn is None
        if self.turn is not None:
            self.hooks.end_turn(self)
        self._end_epoch()
        self.turn = None
        if ended:
            self.hooks.end_epoch(self)

    def _end_epoch(self) -> None:
        self._repeats = self._stale = self._ending = False
        if self._open:
            self._open = False
            self._pipeline.end_epoch()
            self.epoch += 1
            self._index = 0

    def _weigh_batch(self, step: GlobalBatch) -> GlobalBatch:
        """Return the step with the weights of this worker's part, which is read for it, and of
        all workers together.
        """
        assert self.terms.weigh is not None
        part = step.take_part()
        weight = _weigh_part(self.terms.weigh, part)
        answers = self.terms.agreement.meet("weights", struct.pack("<d", weight))
        total = math.fsum(struct.unpack("<d", answer)[0] for answer in answers)
        return replace(step, make_part=lambda: part, weight=weight, total=total)

    def _make_turn(self, step: GlobalBatch) -> tuple[Turn, list[Any]]:
        """Turn of a global batch, and a list that alone holds this worker's part of it."""
        part, terms, whole = step.take_part(), self.terms, step.global_batch
        share, ghost = part.share, part.share == 0
        if terms.unchecked_batches and terms.training:
            terms.check_labels(part)
        weight, total = (share, whole) if step.weight is None else (step.weight, step.total)
        scale = 0.0 if ghost or not total else 1.0 if terms.loss == "sum" else weight / total
        units = float(share) if part.units is None else part.units
        turn = Turn(
            self._index,
            self.epoch,
            whole,
            share,
            weight,
            total,
            ghost,
            terms.training,
            scale,
            step.source,
            units,
            step.rows,
        )
        return turn, [part.batch]


def _weigh_part(weigh: Weigh, part: SharePart) -> float:
    if part.share == 0:
        return 0.0
    weight = float(weigh(part.batch))
    if not 0 <= weight < math.inf:
        raise DataError(
            f"weigh gave {weight} for a batch of {part.share} samples: "
            "a weight is a number, zero or more"
        )
    return weight


def _compare_terms(terms: LoaderSpec, what: str, facts: list[Any]) -> None:
    """Meet the others at `what`, and raise `DataError` where they deal on other terms, or have
    other data sets as an epoch begins.
    """
    if terms.agreement.is_alone:
        return
    own_terms = [
        *facts,
        probe_policy(terms.shares, terms.loader.batch_size),
        terms.loss,
        terms.shard,
        terms.cost_kind,
    ]
    names = [*("epoch", "step", "train")[: len(facts)], "shares", "loss", "shard", "cost="]
    body = msgpack.packb((own_terms, terms.outline_data() if facts else {}))
    others = [msgpack.unpackb(answer) for answer in terms.agreement.gather_alike(what, body)]
    for rank, (other, _) in enumerate(others):
        for name, value, first in zip(names, other, others[0][0], strict=True):
            if value != first:
                raise DataError(
                    f"workers deal a loader on different terms: {name} is {value} on rank {rank} "
                    f"and {first} on rank 0"
                )
    if different := describe_difference([described for _, described in others]):
        raise DataError(
            "workers have different data sets, and the samples of one are dealt to all: "
            f"{different}. Seed a random split alike on all "
            "workers, sort lists of files, and don't cut data by rank"
        )
