"""Deals map-style data: a DataLoader reads this worker's share of each batch.

    EpochIndices --global batches--> IndexFeed --this worker's share--> DataLoader --> batches
                                         |                                               |
                                         +- requested_parts: SharePart of each request --+--> turn

The inner DataLoader has the options of the script's own. It reads ahead, so requests of the feed
run ahead of the steps, and both meet again in the order of the requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import msgpack
import torch
from torch.utils.data import DataLoader

from paceline.data import rng
from paceline.data.costs import BatchDeal
from paceline.data.empty_batch import empty_rows
from paceline.data.reader_failure import read_batch
from paceline.data.sampler import EpochIndices, is_index_list
from paceline.data.shares import share_bounds
from paceline.data.spec import (
    GlobalBatch,
    LoaderSpec,
    Pipeline,
    SharePart,
    deal_rows,
    find_ghost_source,
)
from paceline.errors import DataError

READ_WHOLE = (
    "each item of the data set is a whole batch here (batch_size=None): every worker reads it all "
    "and takes its rows along dim 0"
)
# Marks a request of one sample that is followed by a request of the same sample twice. The two
# batches together show which of their values are rows.
REPEATED_NEXT: Final = "twice"


class IndexFeed:
    """Index lists of one worker, in the order in which its DataLoader requests them."""

    def __init__(self, terms: LoaderSpec) -> None:
        self.terms = terms
        self.indices: EpochIndices | None = None
        # Round and part of each request whose batch hasn't been taken yet.
        self.requested_parts: deque[tuple[int, SharePart]] = deque()
        self.round = 0  # batches of requests from earlier rounds are discarded
        # Whether empty shares are requested as ghosts, by the terms at the begin of the round.
        self.requests_ghosts = True
        self._step = 0
        # Index lists of the last step, and their parts, that haven't been requested yet.
        self._pending_lists: deque[tuple[Any, SharePart]] = deque()
        self._deals: dict[int, BatchDeal] = {}  # by step, from the present step on

    def __iter__(self) -> IndexFeed:
        return self

    def __next__(self) -> Any:
        if not self._pending_lists:
            batch = None if self.indices is None else self.indices.batch_of(self._step)
            if batch is None:
                raise StopIteration
            self._pending_lists.extend(self._cut_batch(batch))
            self._step += 1
        index, part = self._pending_lists.popleft()
        self.requested_parts.append((self.round, part))
        return index

    def continue_at(self, indices: EpochIndices, step: int) -> None:
        """Continue at `step` in a new round, so that earlier requests are discarded."""
        self.indices = indices
        self.round += 1
        self.requests_ghosts = self.terms.uses_ghosts
        self._step = step
        self._pending_lists.clear()
        self._deals.clear()

    def deal_by_cost(self, step: int, batch: Any) -> BatchDeal:
        """Deal the global batch of a step by cost, once."""
        if step not in self._deals:
            self._deals[step] = self.terms.deal_by_cost(batch)
        return self._deals[step]

    def forget_deals(self, step: int) -> None:
        """Drop the deals of steps before this one."""
        for past in [earlier for earlier in self._deals if earlier < step]:
            del self._deals[past]

    def _cut_batch(self, batch: Any) -> Iterator[tuple[Any, SharePart]]:
        """Yield this worker's index lists in a global batch: one, or two for an empty share."""
        terms = self.terms
        if terms.loader.batch_sampler is None and not is_index_list(batch):
            # A single index, whose item is a whole batch: it is cut when it has been read.
            yield batch, SharePart(0, 0, None)
            return
        count = len(batch)
        if terms.is_alone:
            yield batch, SharePart(count, count, None)
            return
        if terms.deals_by_cost:
            yield from self._cut_by_cost(batch)
            return
        start, stop = share_bounds(terms.shares(count))[terms.rank]
        twice = stop == start and not self.requests_ghosts
        yield (
            batch[start:stop] if stop > start else batch[:1],
            SharePart(count, stop - start, REPEATED_NEXT if twice else None),
        )
        if twice:
            yield [*batch[:1], *batch[:1]], SharePart(count, 0, None)

    def _cut_by_cost(self, batch: Any) -> Iterator[tuple[Any, SharePart]]:
        rank, deal = self.terms.rank, self.deal_by_cost(self._step, batch)
        share, count = len(deal.places[rank]), len(batch)
        # An empty share reads the first sample of the batch, once or twice, as in `_cut_batch`.
        twice = not share and not self.requests_ghosts
        yield (
            deal.indices_of(batch, rank) if share else batch[:1],
            SharePart(count, share, REPEATED_NEXT if twice else None, deal.costs[rank]),
        )
        if twice:
            yield [*batch[:1], *batch[:1]], SharePart(count, 0, None)


class IndexedPipeline(Pipeline):
    """The pipeline of a map-style data set."""

    def __init__(self, terms: LoaderSpec) -> None:
        self.terms = terms
        self._feed = IndexFeed(terms)
        self._indices: EpochIndices | None = None
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._last_step = -1  # the last step that was dealt
        self._part_unread = False  # its part has not been read
        # Round and part of a batch that was read ahead for `peek_batch`.
        self._peeked: tuple[int, tuple[SharePart, Any]] | None = None
        self.indices_at_once: int | None = None  # indices to draw at a time, as in `EpochIndices`

    def begin_epoch(self, epoch: int, state: dict[str, Any] | None) -> int:
        """Begin an epoch with the draws of a plain DataLoader: its base seed, then its sampler.

        At a position in the middle of an epoch, the same order is drawn again, from the same states
        of the generators, and skipped up to there.
        """
        terms, loader, order = self.terms, self.terms.loader, self.terms.order
        self.end_epoch()
        order.begin_epoch()
        start, check, present = 0, None, None
        if state is not None:
            start, check = int(state["step"]), int(state["check"])
            rng.set_own_state(loader, state["own"] if state["origin"] is None else state["origin"])
            # Shared generators go back to the begin of the epoch for a moment.
            if state["shared"] is not None:
                present = order.get_shared_state()
                order.set_shared_state(state["shared"])
        # A DataLoader with persistent workers draws its base seed in the first epoch only.
        seeded = (
            not (loader.persistent_workers and self._loader is not None)
            if state is None
            else bool(state["seeded"])
        )
        # The states before any draw: from them, the order can be drawn again.
        origin = {
            "own": rng.get_own_state(loader),
            "shared": order.get_shared_state(),
            "seeded": seeded,
        }
        with order.draw_from_order():
            # A copy: the inner DataLoader must not move the script's generator once more.
            seeds = rng.make_reader_generator(loader.generator, self.terms.rank)
            if seeded:
                rng.draw_seed(loader.generator)
        depth, learn = self._agree_on_prefetch(), partial(_exchange_costs, terms)
        indices = EpochIndices(
            loader,
            terms.agreement,
            order,
            ahead=depth,
            origin=origin,
            start=start,
            at_once=self.indices_at_once,
            learn=learn,
        )
        self._indices = indices
        indices.draw_first(check)
        if present is not None:
            order.set_shared_state(present)
        if start == 0 and indices.batch_of(0) is None:
            raise DataError(
                f"the loader has no batch: {_describe_length(loader)} samples, batch size "
                f"{loader.batch_size}, drop_last={loader.drop_last}. "
                "Give more samples, a smaller batch size, or drop_last=False"
            )
        self._last_step = start - 1
        self._feed.continue_at(indices, start)
        self.handle_first_indices(start)
        self._open_loader(seeds)
        return start

    def handle_first_indices(self, start: int) -> None:
        """Called when the first indices are here, before any batch is read. Does nothing."""

    def deal_step(self, index: int) -> GlobalBatch | None:
        indices = self._epoch_indices
        self._last_step = index
        indices.fetch_chunk(index)
        batch = indices.batch_of(index)
        if batch is None:
            return None
        if self.terms.loader.batch_sampler is None and not is_index_list(batch):
            if not self.terms.is_alone:
                self.terms.announce_once(READ_WHOLE)
            return deal_rows(self.terms, self._read_part()[1])
        terms, count = self.terms, len(batch)
        self._feed.forget_deals(index)
        deal = self._feed.deal_by_cost(index, batch) if terms.deals_by_cost else None
        shares = terms.shares(count) if deal is None else deal.shares
        # A ghost was requested for an empty share, and evaluation wants no rows: request again.
        if self._feed.requests_ghosts and not terms.uses_ghosts and shares[terms.rank] == 0:
            self.redeal_step(index)
        self._part_unread = True
        return GlobalBatch(
            count,
            self._take_part,
            find_ghost_source(shares),
            rows=None if deal is None else deal.places,
        )

    def peek_batch(self) -> Any:
        # Items may be whole batches, which aren't cut before their step.
        may_be_whole = self.terms.loader.batch_sampler is None and not self._part_unread
        if may_be_whole or (
            not self._part_unread and self._epoch_indices.batch_of(self._last_step + 1) is None
        ):
            return None
        if self._peeked is None or self._peeked[0] != self._feed.round:
            self._peeked = self._feed.round, self._read_part()
        return self._peeked[1][1]

    def redeal_step(self, index: int) -> None:
        self._feed.continue_at(self._epoch_indices, index)

    def regroup(self, index: int) -> None:
        # A worker that joins calls this in `begin_epoch`, so all others must call it too.
        self._agree_on_prefetch()
        self._epoch_indices.regroup(self.terms.agreement, index)
        self.redeal_step(index)

    def position_at(self, index: int) -> dict[str, Any]:
        indices = self._epoch_indices
        origin = indices.origin
        return {
            "step": index,
            "check": indices.mark_before(index),
            "own": None,
            "origin": origin["own"],
            "shared": origin["shared"],
            "seeded": origin["seeded"],
        }

    def epoch_start(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "step": 0, "check": 0}

    def next_epoch_start(self) -> dict[str, Any]:
        seeded = not (self._loader is not None and self.terms.loader.persistent_workers)
        return {
            "step": 0,
            "check": 0,
            "own": rng.get_own_state(self.terms.loader),
            "origin": None,
            "shared": None,
            "seeded": seeded,
        }

    def end_epoch(self) -> None:
        self._batches = self._peeked = None
        if self._indices is not None and self._feed.indices is not None:
            self._indices.undo_later_draws(self._last_step + 1)
        self._feed.indices = None
        self._feed.requested_parts.clear()

    @property
    def _epoch_indices(self) -> EpochIndices:
        assert self._indices is not None, "the epoch has not begun"
        return self._indices

    def _agree_on_prefetch(self) -> int:
        """Agree on the deepest prefetch of all workers, in batches. Collective.

        One more for `peek_batch`.
        """
        own_depth = self.terms.loader.num_workers * (self.terms.loader.prefetch_factor or 0)
        depths: list[int] = [
            msgpack.unpackb(depth)
            for depth in self.terms.agreement.meet("read ahead", msgpack.packb(own_depth))
        ]
        return max(depths) + 1

    def _open_loader(self, seeds: torch.Generator) -> None:
        """Start to read at the position of the feed."""
        loader = self.terms.loader
        if self._loader is None or not loader.persistent_workers:
            self._loader = make_loader_like(
                loader, self._feed, seeds, batched=loader.batch_sampler is not None
            )
        self._batches = iter(self._loader)

    def _take_part(self) -> SharePart:
        part, data = self._read_part()
        self._part_unread = False
        return part._replace(batch=data)

    def _empty_batch(self, data: Any) -> Any:
        twice = self._read_part()[1]
        return (
            data
            if self.terms.uses_ghosts
            else empty_rows(data, twice, surely=not self.terms.training)
        )

    def _read_part(self) -> tuple[SharePart, Any]:
        """Read the next part that isn't discarded, with its batch."""
        peeked, self._peeked = self._peeked, None
        if peeked is not None and peeked[0] == self._feed.round:
            return peeked[1]
        # Batches come in the order of the requests. Skip those of earlier rounds.
        reopened = False
        while True:
            assert self._batches is not None
            data = read_batch(self._batches, self)
            if data is not self:
                request_round, part = self._feed.requested_parts.popleft()
                if request_round == self._feed.round:
                    return part, data if part.batch is not REPEATED_NEXT else self._empty_batch(
                        data
                    )
            elif reopened:
                raise DataError(
                    "the data set ended an epoch by itself: "
                    "StopIteration came out of its __getitem__"
                )
            else:
                # The DataLoader had asked the feed at the end of the epoch, and ended. Since then
                # steps were dealt again, so open it once more.
                reopened = True
                self._open_loader(
                    rng.make_reader_generator(self.terms.loader.generator, self.terms.rank)
                )


def make_loader_like(
    loader: DataLoader[Any],
    feed: Any,
    seeds: torch.Generator,
    *,
    batched: bool,
    dataset: Any = None,
) -> DataLoader[Any]:
    """Make a DataLoader with the options of `loader`, but with the indices of `feed`.

    Args:
        loader: DataLoader of the script.
        feed: Sampler, or batch sampler if `batched`.
        seeds: Generator of the base seed.
        batched: Whether `feed` gives lists of indices, whose samples are collated.
        dataset: Data set in place of the script's; its items aren't collated. Default: none.
    """
    index: dict[str, Any] = (
        {"batch_sampler": feed} if batched else {"batch_size": None, "sampler": feed}
    )
    return DataLoader(
        loader.dataset if dataset is None else dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn if dataset is None else _identity,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=seeds,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        **index,
    )


def _identity(value: Any) -> Any:
    return value


def _describe_length(loader: DataLoader[Any]) -> str:
    try:
        return str(len(loader.dataset))  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return "an unknown number of"


def _exchange_costs(terms: LoaderSpec, batches: list[Any]) -> None:
    """Exchange the costs of these batches, if they are dealt by cost. Collective."""
    # A function, not a method of the pipeline: `EpochIndices` keeps it, and a cycle through the
    # pipeline would leave its DataLoader to the garbage collector, which ends the DataLoader's
    # workers in any thread.
    if terms.deals_by_cost and terms.costs is not None:
        terms.costs.exchange_costs(batches, terms.agreement)
