"""Deals a script's DataLoader: each worker iterates over its share of each global batch.

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
    global_batch: int  # samples of all workers
    share: int  # samples of this worker
    weight: float  # weight of this worker's part: its samples, or the result of `weigh`
    total: float  # weight of all workers' parts together
    ghost: bool  # the batch is a ghost: its weight is 0, and zeros replace its gradients
    train: bool
    scale: float  # factor of this worker's gradients before they are summed over workers
    source: int | None = None  # first rank with samples, if some worker has a ghost
    units: float = 0.0  # work in this worker's share: its samples, or their cost
    # Per rank: its rows in the global batch. None: shares lie one after the other.
    rows: Sequence[Sequence[int]] | None = None


class LoaderObserver(Protocol):
    """Callbacks of a loader, in the thread that iterates over it.

        prepare_epoch, begin_epoch -> begin_turn -> end_turn -> end_epoch
                                          ^            |
                                          +------------+

    `prepare_epoch` is called before all workers meet for an epoch. `generation` is called before
    each step if the membership can change (`changes`). It counts the changes of the membership; if
    it rises, the loader deals to the present workers, once all of them are at the same step.
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

    changes = True  # subclasses may override `generation`

    def prepare_epoch(self, loader: ShareLoader) -> None:
        """Do nothing."""

    def generation(self, loader: ShareLoader) -> int:
        """Generation 0: the workers stay the same."""
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
    """Deal a DataLoader, whose batch size is that of all workers together.

    All workers call this with the same arguments.

    Args:
        loader: The script's DataLoader.
        agreement: The workers.
        shares: None (equal), one number per rank (ratios), a policy (samples of a global batch ->
            shares), or "auto" (by `speeds`, once they are measured). Default: None.
        speeds: Measured speeds of the workers, for shares="auto". Default: none so far.
        loss: Reduction of the script's loss function: "mean" or "sum". Default: "mean".
        weigh: Function from a batch to its weight, if the loss is a mean over something other than
            samples. Default: the number of samples.
        cost: Function from a sample to its cost. Sums of costs are in proportion to shares.
            Default: samples are dealt by count.
        train: Whether the loader is for training. None: `torch.is_grad_enabled()` at iter().
        pad: Whether an empty share in evaluation is a ghost (the first sample of the batch), as in
            training, and not a batch without rows. Default: False.
        shard: "mine" for a stream that gives each rank its own samples; otherwise each worker reads
            all samples.
        hooks: Observer of the loader. Default: none.
        say: Called with each message for the user, once. Default: ignored.
        move: Moves each batch to a device. Default: it stays.
        sample_queue: Queue from which workers out of lockstep take samples to train on. Default:
            workers are in lockstep.
        order: Sample order that several loaders share. Default: an order of its own.

    Raises:
        DataError: The loader can't be dealt. For example, it has a DistributedSampler, a stream
            that shards itself, no length, or no batch.
        UsageError: `weigh` is given, and workers are out of lockstep.
    """
    check_loader(loader, loss, weigh)
    policy = make_policy(shares, agreement.group.size)
    options: dict[str, Any] = {
        "train": train,
        "pad": pad,
        "shard": shard,
        "say": say,
        "move": move,
        "order": order or SampleOrder(),
    }
    terms = LoaderSpec(loader, agreement, policy, loss=loss, weigh=weigh, asked=shares, **options)
    # The outline is taken now, as a script may change its data set later.
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
    # Streams and map-style data have pipelines of their own.
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

    Its length is the number of global batches. All other attributes (`dataset`, `batch_size`, ...)
    are those of the user's DataLoader.

    Invariants:
        - `turn` is set from the moment a batch is given to the script until its turn has ended.
        - `_open` is true from iter() to the end of the epoch. `_repeats`, `_stale` and `_ending`
          are true only while it is.
        - `_index` is the step of `turn`, or the next step if there is no turn. `epoch` is the epoch
          under way, or the next one.
        - Only the iterator of the newest iter(), by `_round`, may move the loader.
        - `_resumed` is set from `load_state_dict` to the next iter().
    """

    def __init__(self, terms: LoaderSpec, pipeline: Pipeline, hooks: LoaderObserver) -> None:
        self.terms = terms
        self.hooks = hooks
        self.turn: Turn | None = None
        # References to the batch of the last turn of training, if there are several workers.
        self.lent_batch: LentTensors = []
        self.epoch = 0
        self._pipeline = pipeline
        self._index = 0
        self.ran_through = False  # the last epoch was not left by `break`
        self._round = 0  # number of calls of iter()
        self._open = False
        self._repeats = False  # the present step is dealt again next
        self._stale = False  # batches that were read ahead are dealt by outdated shares
        self._ending = False  # the epoch ends after the present step
        self._resumed: dict[str, Any] | None = None  # saved position at which the next epoch begins
        self._left_out = False  # the next iter() gives no batches
        self._generation = 0  # generation of the workers that batches are dealt to

    def __len__(self) -> int:
        if self.terms.shard == "mine" and not self.terms.is_alone:
            raise TypeError(
                "the length of a stream that shards itself by rank is unknown: each worker knows "
                "only its own part"
            )
        return len(self.terms.loader)

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask for attributes before `terms` is set.
        if name == "terms":
            raise AttributeError(name)
        return getattr(self.terms.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self.end_epoch()
        if self._left_out:
            self._left_out = False
            return iter(())
        # 1. Learn which workers there are, and deal to them.
        terms = self.terms
        terms.begin_epoch()
        self.hooks.prepare_epoch(self)
        # A single worker needs the outline as well if others may join later.
        if terms.agreement.recovery is not None:
            terms.outline_data()
        if (now := self.hooks.generation(self)) != self._generation:
            self._generation = now
            terms.set_shares(terms.shares_of_present())
        # 2. Check that all workers begin the same epoch on the same terms.
        state, self._resumed = self._resumed, None
        _compare_terms(
            self.terms, "epoch", self._list_position(0 if state is None else state["step"])
        )
        # 3. Draw the order of the samples, and start to read.
        self._index = self._pipeline.begin_epoch(self.epoch, state)
        self._open = True
        self.hooks.begin_epoch(self)
        return self._deal_epoch(self._round)

    @property
    def length(self) -> int | None:
        """Result of `len()`, or None if the length is unknown."""
        try:
            return len(self)
        except (TypeError, NotImplementedError):
            # Raised by samplers and streams without a length.
            return None

    @property
    def under_way(self) -> bool:
        """Whether an epoch has begun and has not ended, by its last batch or by `break`."""
        return self._open

    def reshare(self, shares: RequestedShares) -> None:
        """Deal by other shares from the next step on.

        If the present turn is repeated, they apply to it already. All workers call this in the same
        turn.
        """
        self.terms.set_shares(shares)
        _compare_terms(self.terms, "shares", [])
        # Inside a turn, batches are dealt again when the turn has ended.
        self._stale = self._open
        if self.turn is None:
            self._deal_again_if_stale()

    def repeat_turn(self, shares: RequestedShares = None) -> None:
        """Deal the present global batch again after this turn, by `shares` if they are given.

        All workers call this in the same turn. If the script has left the loop by `break`, the
        epoch has ended, and nothing is dealt again.
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
        """Continue with other workers, and deal the present global batch to them again.

        All workers of the new group call this.

        Args:
            agreement: The new workers.
            shares: Their shares. Default: equal.
        """
        self.terms.regroup(agreement, shares)
        facts = self._list_position(self._pipeline.common_step(self._index))
        # A worker that joins in the middle of an epoch makes the same comparison in iter().
        _compare_terms(self.terms, "epoch", facts)
        if self._open:
            self._repeats = self.turn is not None
            self._pipeline.regroup(self._index)

    def _list_position(self, step: int) -> list[Any]:
        return [self.epoch, step, self.terms.training]

    def _follow_membership(self) -> bool:
        """Deal to the present workers if they have changed. Returns whether they have."""
        changed = False
        # The workers may change again during the regrouping, so ask until they stay the same.
        while (now := self.hooks.generation(self)) != self._generation:
            # Out of lockstep, the queue deals to the present workers by itself.
            if self._pipeline.is_apart:
                self._generation = now
                self.terms.set_shares(self.terms.shares_of_present())
                continue
            self._generation, changed = now, True
            self._repeats = self._stale = False
            self.regroup(self.terms.agreement, self.terms.shares_of_present())
        return changed

    def peek(self) -> Any:
        """Read this worker's part of the next batch ahead, for early use in the loop body.

        The batch isn't moved to the device, and stays the next batch. None if there is none.
        """
        return (
            self._pipeline.peek_batch()
            if self._open and self.turn is not None and not self._ending
            else None
        )

    def finish_epoch(self) -> None:
        """End the epoch after the present turn. All workers call this in the same turn."""
        self._ending = self._open

    def end_turn(self) -> bool:
        """End the present turn, as the request for the next batch does.

        It is for loops that do something between two batches that must see the step taken. All
        workers call it in the same turn.

        Returns:
            Whether the global batch is dealt again next, because the turn has failed.
        """
        if self.turn is None:
            return False
        self.hooks.end_turn(self)
        return self._move_on()

    def _move_on(self) -> bool:
        """Move to the next step, or to the present one if it is repeated; returns whether it is."""
        repeats, self.turn = self._repeats, None
        if not repeats:
            self._index += 1
        self._stale, self._repeats = self._stale or repeats, False
        self._deal_again_if_stale()
        return repeats

    def end_epoch(self) -> None:
        """End the epoch under way, if there is one, and tell the observer.

        Iterators do so after their last batch. It is also for loops that count batches, and don't
        ask for another one after the last. All workers call it at the same place.
        """
        self._round += 1  # older iterators must not touch the loader any more
        ended = self._open or self.turn is not None
        self.ran_through = self._open and self.turn is None
        if self.turn is not None:
            self.hooks.end_turn(self)
        self._end_epoch()
        self.turn = None
        if ended:
            self.hooks.end_epoch(self)

    def state_dict(self, *, redo: bool = False) -> dict[str, Any]:
        """Position of this loader, the same on every worker: numbers, text and tensors.

        Inside the loop body the present step counts as done. With `redo` it doesn't, so that it is
        dealt again.
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
        """Go to the position of a `state_dict`, at which the next iter() continues.

        The number of workers may be another one.
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
        """Give no batches at the next iter(), if `through`.

        A resumed script comes again to loops that had ended in the same epoch.
        """
        self._left_out = through

    def restart_evaluation(self) -> None:
        """Restart an evaluation that was under way when the loaded state was saved.

        Results of its first samples were in variables of the script, and are lost.
        """
        if self._resumed is not None and not self._resumed.get("training", True):
            self._resumed = self._pipeline.epoch_start(self._resumed)

    def _deal_epoch(self, round_begun: int) -> Iterator[Any]:
        terms = self.terms
        try:
            while (step := self._next_global_batch()) is not None:
                turn, batch_holder = self._make_turn(step)
                self.turn = turn
                self.hooks.begin_turn(self, turn)
                if terms.move is not None:
                    batch_holder[0] = terms.move(batch_holder[0])
                if turn.train and terms.agreement.group.size > 1:
                    self.lent_batch = track_batch(batch_holder[0])
                # From here on only the script has a reference to the batch, so its memory is free
                # as soon as the script drops it.
                yield batch_holder.pop()
                if round_begun != self._round:
                    raise DataError(
                        "a newer iter() of this loader has ended this one: a loader has one "
                        "position, so end a loop before the next one begins"
                    )
                if self.turn is None:  # the loop has called `end_turn`
                    continue
                self.hooks.end_turn(self)
                if self._repeats or self._stale:
                    self._move_on()
                else:  # as `_move_on` does, without a call in each step
                    self.turn = None
                    self._index += 1
            self.end_epoch()
        finally:
            # The script has left the loop by `break` or an exception. After a newer iter() this
            # iterator must not touch the loader.
            if round_begun == self._round:
                self._end_epoch()

    def _next_global_batch(self) -> GlobalBatch | None:
        """Deal the next global batch to the present workers; None if the epoch is over."""
        changes = self.hooks.changes
        if changes:
            self._follow_membership()
        while True:
            step = None if self._ending else self._pipeline.deal_step(self._index)
            step = (
                step if step is None or self.terms.weigh is None else _weigh_batch(self.terms, step)
            )
            if step is None and self._pipeline.is_paused:
                # Workers out of lockstep have met in the middle of the epoch, where others can
                # join.
                self._generation = self.hooks.generation(self)
                self.regroup(self.terms.agreement, self.terms.shares_of_present())
            elif not (changes and self._follow_membership()):
                # No worker was lost while the step was dealt. Otherwise deal it again.
                return step

    def _deal_again_if_stale(self) -> None:
        if self._stale:
            self._stale = False
            self._pipeline.redeal_step(self._index)

    def _end_epoch(self) -> None:
        self._repeats = self._stale = self._ending = False
        if self._open:
            self._open = False
            self._pipeline.end_epoch()
            self.epoch += 1
            self._index = 0

    def _make_turn(self, step: GlobalBatch) -> tuple[Turn, list[Any]]:
        """Make the turn of a global batch, and a list with the only reference to this part of it.

        The scale makes the sum over workers the gradient of the mean over the global batch.
        """
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


def _weigh_batch(terms: LoaderSpec, step: GlobalBatch) -> GlobalBatch:
    """Exchange the weights of all parts, and set them in the step. Collective.

    Reads this worker's part.
    """
    assert terms.weigh is not None
    part = step.take_part()
    weight = _weigh_part(terms.weigh, part)
    answers = terms.agreement.meet("weights", struct.pack("<d", weight))
    total = math.fsum(struct.unpack("<d", answer)[0] for answer in answers)
    return replace(step, make_part=lambda: part, weight=weight, total=total)


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
    """Compare the terms of all workers. Collective.

    Args:
        terms: Terms of this worker.
        what: Name of the exchange, the same on all workers.
        facts: Epoch, step and training of this worker; then data sets are compared as well. Empty:
            only the terms are compared.

    Raises:
        DataError: Terms or data sets differ.
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
    answers = [msgpack.unpackb(answer) for answer in terms.agreement.gather_alike(what, body)]
    for rank, (other, _) in enumerate(answers):
        for name, value, first in zip(names, other, answers[0][0], strict=True):
            if value != first:
                raise DataError(
                    f"workers deal a loader on different terms: {name} is {value} on rank {rank} "
                    f"and {first} on rank 0"
                )
    if difference := describe_difference([outline for _, outline in answers]):
        raise DataError(
            f"workers have different data sets, and all need the same one: {difference}. "
            "Use the same seed for a random split on all workers, sort lists of files, and don't "
            "cut data by rank"
        )
