"""Dealing of streams, data that can only be read from its start: each reader reads every global
batch and cuts the shares out of it.

step t      one global batch = the next one of DataLoader worker t % W (as torch does it; those that
            have ended are left out)
reader      keeps the samples of the batches that it has read ahead, so that they can be dealt again
            by other shares
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgpack
import torch
from torch.utils.data import DataLoader, IterDataPipe

from paceline.data import rng
from paceline.data.indexed import like
from paceline.data.reader import ReadCommand, ReadResult, ReadStart, ReadState, StreamReader
from paceline.data.reader_failure import read
from paceline.data.spec import GlobalBatch, LoaderSpec, Pipeline, Sharding
from paceline.data.stream_access import ReadAll, SelfSharded, StreamAccess, StreamPosition
from paceline.errors import DataError
from paceline.formatting import unknown
from paceline.state.snapshot import byte_tensor

COMPARED = 16  # steps between two comparisons of what the workers read


class ReadCommands:
    """The commands to the DataLoader workers of a stream, in turn; `issued` remembers them."""

    def __init__(self, workers: int) -> None:
        self.issued: deque[tuple[int, int]] = deque()  # (round, worker; -1: nothing was asked)
        self.round = 0  # answers to commands of an earlier round are discarded
        self.oldest = [0] * workers  # the batches of each worker that may be asked for again
        self._workers = workers
        self._slot = 0  # commands given so far: a DataLoader hands them to its workers in turn
        self._starts: dict[int, ReadStart] = {}  # of the workers that haven't begun
        self._numbers = [0] * workers
        self._ended = [False] * workers
        self._next = 0
        self._ask = ReadCommand(0)

    def __iter__(self) -> ReadCommands:
        return self

    def __next__(self) -> ReadCommand:
        worker = self._slot % self._workers
        self._slot += 1
        asked = worker == self._next and not self._ended[worker]
        self.issued.append((self.round, worker if asked else -1))
        if worker == self._next:
            self._next = (worker + 1) % self._workers
        if not asked:
            return ReadCommand(-1, self.oldest[worker])
        self._numbers[worker] += 1
        return self._ask._replace(
            number=self._numbers[worker] - 1,
            oldest=self.oldest[worker],
            start=self._starts.pop(worker, None),
        )

    def open(self, cursor: StreamPosition) -> None:
        """Begin a new iterator of a DataLoader, from its first worker on."""
        self._slot = 0
        self.issued.clear()
        saved = zip(cursor.numbers, cursor.states, cursor.marks, strict=True)
        self._starts = {worker: ReadStart(*start) for worker, start in enumerate(saved)}

    def go(self, cursor: StreamPosition, ask: ReadCommand) -> None:
        """Go on where `cursor` is, with commands like `ask`; earlier commands are discarded."""
        self.round += 1
        self._numbers, self._ended, self._next, self._ask = (
            list(cursor.numbers),
            list(cursor.ended),
            cursor.worker,
            ask,
        )

    def end(self, worker: int) -> None:
        """Note that the stream of a worker has ended: it gets no more commands."""
        self._ended[worker] = True


class StreamPipeline(Pipeline):
    """The pipeline of a stream."""

    def __init__(self, terms: LoaderSpec) -> None:
        self.terms = terms
        self._workers = max(1, terms.loader.num_workers)
        self._commands = ReadCommands(self._workers)
        self._hands = _hands(terms)
        self._reader = StreamReader(
            ReadState(
                terms.loader.dataset, terms.loader.collate_fn, drop_last=terms.loader.drop_last
            )
        )
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        # before the step that was asked for last
        self._before = StreamPosition.at_start(self._workers)
        self._after = self._before  # and after it
        self._index = 0
        self._ghosts = True  # what an empty share is, as it was asked for
        self._origin: dict[str, Any] = {}  # what the generators were when the epoch began

    def begin(self, epoch: int, state: dict[str, Any] | None) -> int:
        loader, terms = self.terms.loader, self.terms
        self.end()
        terms.order.begin()
        if state is not None:
            rng.put_own(loader, state["own"])
        taken_up = state is not None and state["cursors"] is not None
        fresh = self._loader is None or not loader.persistent_workers
        seeded = fresh if state is None else bool(state["seeded"])
        self._origin = {
            "own": rng.own_state(loader),
            "seeded": seeded,
            "seeds": self._seeds().get_state(),
        }
        if taken_up and state is not None:
            self._origin["seeds"] = state["seeds"]
        if seeded and (loader.generator is not None or not taken_up):
            with self._drawing():
                rng.draw_seed(loader.generator)
        self._after = StreamPosition.at_start(self._workers)
        if taken_up and state is not None:
            self._hands.restored(self._after, state["cursors"])
        self._before = self._after.copy()
        self._index = int(state["step"]) if state is not None else 0
        if not terms.alone:
            terms.announce(self._hands.cost)
        self._open()
        return self._index

    def step(self, index: int) -> GlobalBatch | None:
        if self._ghosts != self.terms.ghosts:
            self._ghosts = self.terms.ghosts
            self.redeal(index)
        self._before, self._after = self._after, self._after.copy()
        self._commands.oldest = self._before.numbers
        self._index = index
        step = self._hands.step(self._fetch, self._after)
        self._verify(index, ended=step is None)
        if step is None and index == 0:
            name = type(self.terms.loader.dataset).__qualname__
            raise DataError(
                f"the stream {name} has no batch: it is empty, or shorter than one batch, with "
                "drop_last=True"
            )
        return step

    def peek(self) -> Any:
        return None

    def redeal(self, index: int) -> None:
        if index == self._index:
            self._after = self._before.copy()
        self._commands.go(self._after, self._ask())

    def regroup(self, index: int) -> None:
        if self.terms.shard == "mine":
            raise DataError(
                "a stream that shards itself can't go on in another group: load a saved state there"
            )
        self._hands = _hands(self.terms)
        self.redeal(index)

    def state(self, index: int) -> dict[str, Any]:
        cursor = self._before if index == self._index else self._after
        return {"step": index, "cursors": self._hands.saved(cursor), **self._origin}

    def first(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "step": 0, "cursors": None}

    def next_epoch(self) -> dict[str, Any]:
        seeded = self._loader is None or not self.terms.loader.persistent_workers
        return {
            "step": 0,
            "cursors": None,
            "own": rng.own_state(self.terms.loader),
            "seeded": seeded,
            "seeds": None,
        }

    def end(self) -> None:
        self._batches = None
        self._commands.issued.clear()

    def _fetch(self) -> ReadResult | None:
        """Read the next global batch of the stream; None at its end."""
        after = self._after
        while not all(after.ended):
            assert self._batches is not None
            dealt: ReadResult = read(self._batches, None)
            made, worker = self._commands.issued.popleft()
            if made != self._commands.round or worker < 0:
                continue
            if dealt.ended:
                after.ended[worker] = True
                self._commands.end(worker)
                continue
            after.numbers[worker] += 1
            after.worker = (worker + 1) % self._workers
            after.marks[worker], after.states[worker] = dealt.mark, dealt.state
            return dealt
        return None

    def _open(self) -> None:
        loader, after = self.terms.loader, self._after
        self._commands.open(after)
        self._commands.oldest = after.numbers
        self._commands.go(after, self._ask())
        if self._loader is None or not loader.persistent_workers:
            seeds = torch.Generator()
            seeds.set_state(self._origin["seeds"].clone())
            self._loader = like(loader, self._commands, seeds, batched=False, dataset=self._reader)
        if any(
            count and state is None
            for count, state in zip(after.numbers, after.states, strict=True)
        ):
            self.terms.announce(
                "the stream has no state_dict: it is resumed by reading and leaving out all "
                "samples before its position"
            )
        self._batches = iter(self._loader)

    def _ask(self) -> ReadCommand:
        batch, shares, rank = self._hands.asked()
        self._ghosts = self.terms.ghosts
        return ReadCommand(
            0,
            batch=batch,
            shares=shares,
            rank=rank,
            ghosts=self.terms.ghosts,
            train=self.terms.training,
        )

    def _seeds(self) -> torch.Generator:
        """Make the same base seed for all readers of one stream: shuffled by the seeds of
        DataLoader workers, it is the same for all.
        """
        with self._drawing():
            seeds = rng.twin(self.terms.loader.generator)
        if self.terms.shard != "mine":
            state = self.terms.agreement.tell_everyone(
                "seed", lambda: seeds.get_state().numpy().tobytes()
            )
            seeds.set_state(byte_tensor(state))
            if self.terms.loader.generator is None:
                self.terms.order.put_shared({"torch": seeds.get_state()}, together=False)
        return seeds

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        """Draw what is the same on all workers, but for readers that each have samples of their
        own.
        """
        mine = self.terms.shard == "mine"
        return contextlib.nullcontext() if mine else self.terms.order.drawing()

    def _verify(self, index: int, *, ended: bool) -> None:
        """Compare, now and then and at the end, that all workers have read the same."""
        if (
            self.terms.agreement.is_alone
            or self.terms.shard == "mine"
            or not (ended or index % COMPARED == COMPARED - 1)
        ):
            return
        bodies = self.terms.agreement.gather_alike(
            "stream", msgpack.packb((self._after.marks, self._after.numbers, ended))
        )
        for rank, body in enumerate(bodies):
            if body != bodies[0]:
                raise DataError(
                    f"the stream is not the same on all workers: up to step {index} rank {rank} "
                    "read other samples than rank 0. "
                    "Shuffle by a seed that all workers have; or, if each rank is meant to have "
                    'its own samples, pass shard="mine"'
                )


def check_stream(terms: LoaderSpec) -> None:
    """Raise `DataError` where a stream can't be dealt on these terms."""
    dataset = terms.loader.dataset
    name = type(dataset).__qualname__
    if terms.shard is not None and (wrong := unknown("shard", terms.shard, Sharding)):
        raise DataError(
            f"{wrong} (mine: the stream gives each rank its own samples; none: it does not)"
        )
    if isinstance(dataset, IterDataPipe) and not terms.alone:
        raise DataError(
            f"a {name} is a datapipe, which torch shards by itself: "
            "give a plain torch.utils.data.IterableDataset"
        )
    sign = None if terms.shard is not None else _self_sharding(dataset, 3)
    if sign is not None:
        raise DataError(
            f"the stream {name} shards itself by rank ({sign}): leave that out, and each worker "
            "takes its share of the whole; or pass "
            'shard="mine" to keep it. If it does not shard, pass shard="none"'
        )


def _hands(terms: LoaderSpec) -> StreamAccess:
    if terms.shard == "mine" and not terms.alone:
        return SelfSharded(terms)
    return ReadAll(terms)


def _self_sharding(value: Any, depth: int) -> str | None:
    """Return the sign that a stream cuts itself by rank; None where there is none."""
    called = getattr(value.func if isinstance(value, partial) else value, "__name__", "")
    if called in {"split_by_node", "split_dataset_by_node"}:
        return called
    if "DistributedSampler" in type(value).__qualname__:
        return type(value).__qualname__
    fields = getattr(value, "__dict__", None) or {}
    distributed = fields.get("_distributed")
    if getattr(distributed, "world_size", 1) > 1:
        return "split_dataset_by_node"
    sizes = [
        name
        for name in ("world_size", "num_replicas")
        if type(fields.get(name)) is int and fields[name] > 1
    ]
    if sizes and type(fields.get("rank")) is int:
        return f"it holds a rank, and {sizes[0]}={fields[sizes[0]]}"
    for part in fields.values():
        parts = part if isinstance(part, list | tuple) else [part]
        for piece in parts if depth else []:
            sign = (
                None
                if isinstance(piece, torch.Tensor | torch.nn.Module)
                else _self_sharding(piece, depth - 1)
            )
            if sign is not None:
                return sign
    return None
