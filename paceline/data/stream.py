"""Deals streams: each reader reads whole global batches and cuts this rank's share out.

A stream can only be read from its start. A *reader* is a worker process of a DataLoader.

    step t      the next global batch of reader t % W, as in torch; readers that have ended are
                left out
    commands    the inner DataLoader passes a `ReadCommand` to its readers in turn
    reader      keeps the samples of batches that it has read ahead, so that they can be dealt
                again by other shares
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
from paceline.data.indexed import make_loader_like
from paceline.data.reader import ReadCommand, ReadResult, ReadStart, ReadState, StreamReader
from paceline.data.reader_failure import read_batch
from paceline.data.spec import GlobalBatch, LoaderSpec, Pipeline, Sharding
from paceline.data.stream_access import ReadAll, SelfSharded, StreamAccess, StreamPosition
from paceline.errors import DataError
from paceline.formatting import describe_unknown_choice
from paceline.state.snapshot import copy_to_tensor

STEPS_BETWEEN_CHECKS = 16  # steps between two checks that all workers read the same samples


class ReadCommands:
    """Commands to the readers of a stream; an iterator that the inner DataLoader requests from.

    A DataLoader passes requests to its readers in turn, by `_slot`. Batches come from readers in
    turn, too, but a reader whose stream has ended is left out. So the reader at `_slot` gets an
    empty command unless it is the one whose batch is `_next`.
    """

    def __init__(self, workers: int) -> None:
        # Round and reader of each command whose result hasn't been taken. Reader -1: empty command.
        self.issued: deque[tuple[int, int]] = deque()
        self.round = 0  # results of commands from earlier rounds are discarded
        self.oldest = [0] * workers  # per reader: first batch that may be requested again
        self._workers = workers
        self._slot = 0  # commands that the DataLoader has taken
        self._starts: dict[int, ReadStart] = {}  # of readers that haven't begun
        self._numbers = [0] * workers  # per reader: its batches that were requested
        self._ended = [False] * workers
        self._next = 0
        self._template = ReadCommand(0)  # the command of this round, without a number

    def __iter__(self) -> ReadCommands:
        return self

    def __next__(self) -> ReadCommand:
        worker = self._slot % self._workers
        self._slot += 1
        is_next = worker == self._next and not self._ended[worker]
        self.issued.append((self.round, worker if is_next else -1))
        if worker == self._next:
            self._next = (worker + 1) % self._workers
        if not is_next:
            return ReadCommand(-1, self.oldest[worker])
        self._numbers[worker] += 1
        return self._template._replace(
            number=self._numbers[worker] - 1,
            oldest=self.oldest[worker],
            start=self._starts.pop(worker, None),
        )

    def open_iterator(self, cursor: StreamPosition) -> None:
        """Begin a new iterator of the DataLoader, whose first request goes to reader 0."""
        self._slot = 0
        self.issued.clear()
        saved = zip(cursor.numbers, cursor.states, cursor.marks, strict=True)
        self._starts = {worker: ReadStart(*start) for worker, start in enumerate(saved)}

    def continue_at(self, cursor: StreamPosition, ask: ReadCommand) -> None:
        """Continue at `cursor` in a new round, with commands like `ask`."""
        self.round += 1
        self._numbers, self._ended, self._next, self._template = (
            list(cursor.numbers),
            list(cursor.ended),
            cursor.worker,
            ask,
        )

    def end_reader(self, worker: int) -> None:
        """Give a reader, whose stream has ended, no more commands."""
        self._ended[worker] = True


class StreamPipeline(Pipeline):
    """The pipeline of a stream."""

    def __init__(self, terms: LoaderSpec) -> None:
        self.terms = terms
        self._workers = max(1, terms.loader.num_workers)
        self._commands = ReadCommands(self._workers)
        self._access = _make_access(terms)
        self._reader = StreamReader(
            ReadState(
                terms.loader.dataset, terms.loader.collate_fn, drop_last=terms.loader.drop_last
            )
        )
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        # Positions before and after `_index`, the last step that was dealt.
        self._position_before = StreamPosition.at_start(self._workers)
        self._position_after = self._position_before
        self._last_step = 0
        self._requests_ghosts = True  # whether the present commands make ghosts of empty shares
        self._origin: dict[str, Any] = {}  # state of the generators at the begin of the epoch

    def begin_epoch(self, epoch: int, state: dict[str, Any] | None) -> int:
        loader, terms = self.terms.loader, self.terms
        self.end_epoch()
        terms.order.begin_epoch()
        if state is not None:
            rng.set_own_state(loader, state["own"])
        in_middle = state is not None and state["cursors"] is not None
        # A DataLoader with persistent workers draws its base seed in the first epoch only.
        fresh = self._loader is None or not loader.persistent_workers
        seeded = fresh if state is None else bool(state["seeded"])
        self._origin = {
            "own": rng.get_own_state(loader),
            "seeded": seeded,
            "seeds": self._make_seed_generator().get_state(),
        }
        # In the middle of an epoch, readers need the base seed that they had at its begin.
        if in_middle and state is not None:
            self._origin["seeds"] = state["seeds"]
        if seeded and (loader.generator is not None or not in_middle):
            with self._draw_in_order():
                rng.draw_seed(loader.generator)
        self._position_after = StreamPosition.at_start(self._workers)
        if in_middle and state is not None:
            self._access.restore_positions(self._position_after, state["cursors"])
        self._position_before = self._position_after.copy()
        self._last_step = int(state["step"]) if state is not None else 0
        if not terms.is_alone:
            terms.announce_once(self._access.cost)
        self._open_loader()
        return self._last_step

    def deal_step(self, index: int) -> GlobalBatch | None:
        # Commands that were sent ahead say what to do with an empty share. Send them again if that
        # has changed.
        if self._requests_ghosts != self.terms.uses_ghosts:
            self._requests_ghosts = self.terms.uses_ghosts
            self.redeal_step(index)
        self._position_before, self._position_after = (
            self._position_after,
            self._position_after.copy(),
        )
        self._commands.oldest = self._position_before.numbers
        self._last_step = index
        step = self._access.deal_step(self._fetch_result, self._position_after)
        self._check_same_samples(index, ended=step is None)
        if step is None and index == 0:
            name = type(self.terms.loader.dataset).__qualname__
            raise DataError(
                f"the stream {name} has no batch: it is empty, or shorter than one batch with "
                "drop_last=True; give more samples, a smaller batch size, or drop_last=False"
            )
        return step

    def peek_batch(self) -> Any:
        return None

    def redeal_step(self, index: int) -> None:
        if index == self._last_step:
            self._position_after = self._position_before.copy()
        self._commands.continue_at(self._position_after, self._make_command())

    def regroup(self, index: int) -> None:
        if self.terms.shard == "mine":
            raise DataError(
                "a stream that shards itself can't continue with other workers: load a saved state"
            )
        self._access = _make_access(self.terms)
        self.redeal_step(index)

    def position_at(self, index: int) -> dict[str, Any]:
        cursor = self._position_before if index == self._last_step else self._position_after
        return {"step": index, "cursors": self._access.save_positions(cursor), **self._origin}

    def epoch_start(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "step": 0, "cursors": None}

    def next_epoch_start(self) -> dict[str, Any]:
        seeded = self._loader is None or not self.terms.loader.persistent_workers
        return {
            "step": 0,
            "cursors": None,
            "own": rng.get_own_state(self.terms.loader),
            "seeded": seeded,
            "seeds": None,
        }

    def end_epoch(self) -> None:
        self._batches = None
        self._commands.issued.clear()

    def _fetch_result(self) -> ReadResult | None:
        """Read the next global batch of the stream; None at its end."""
        after = self._position_after
        while not all(after.ended):
            assert self._batches is not None
            result: ReadResult = read_batch(self._batches, None)
            # Results come in the order of the commands.
            command_round, worker = self._commands.issued.popleft()
            if command_round != self._commands.round or worker < 0:
                continue
            # A reader whose stream has ended is left out from now on.
            if result.ended:
                after.ended[worker] = True
                self._commands.end_reader(worker)
                continue
            after.numbers[worker] += 1
            after.worker = (worker + 1) % self._workers
            after.marks[worker], after.states[worker] = result.mark, result.state
            return result
        return None

    def _open_loader(self) -> None:
        loader, after = self.terms.loader, self._position_after
        self._commands.open_iterator(after)
        self._commands.oldest = after.numbers
        self._commands.continue_at(after, self._make_command())
        if self._loader is None or not loader.persistent_workers:
            seeds = torch.Generator()
            seeds.set_state(self._origin["seeds"].clone())
            self._loader = make_loader_like(
                loader, self._commands, seeds, batched=False, dataset=self._reader
            )
        # A reader that has read batches and saved no state has to read them again.
        if any(
            count and state is None
            for count, state in zip(after.numbers, after.states, strict=True)
        ):
            self.terms.announce_once(
                "the stream has no state_dict: to resume it, all samples before its position are "
                "read again and left out"
            )
        self._batches = iter(self._loader)

    def _make_command(self) -> ReadCommand:
        batch, shares, rank = self._access.read_terms()
        self._requests_ghosts = self.terms.uses_ghosts
        return ReadCommand(
            0,
            batch=batch,
            shares=shares,
            rank=rank,
            ghosts=self.terms.uses_ghosts,
            train=self.terms.training,
        )

    def _make_seed_generator(self) -> torch.Generator:
        """Make the generator of the readers' base seed, the same on all workers. Collective.

        A stream that shuffles by the seeds of its readers is then the same on all workers.
        """
        with self._draw_in_order():
            seeds = rng.copy_generator(self.terms.loader.generator)
        if self.terms.shard != "mine":
            state = self.terms.agreement.tell_everyone(
                "seed", lambda: seeds.get_state().numpy().tobytes()
            )
            seeds.set_state(copy_to_tensor(state))
            if self.terms.loader.generator is None:
                self.terms.order.set_shared_state({"torch": seeds.get_state()}, together=False)
        return seeds

    def _draw_in_order(self) -> contextlib.AbstractContextManager[None]:
        """Draw from the common sample order, unless each rank has samples of its own."""
        own_samples = self.terms.shard == "mine"
        return contextlib.nullcontext() if own_samples else self.terms.order.draw_from_order()

    def _check_same_samples(self, index: int, *, ended: bool) -> None:
        """Check that all workers have read the same samples, every few steps and at the end.

        Collective.
        """
        if (
            self.terms.agreement.is_alone
            or self.terms.shard == "mine"
            or not (ended or index % STEPS_BETWEEN_CHECKS == STEPS_BETWEEN_CHECKS - 1)
        ):
            return
        bodies = self.terms.agreement.gather_alike(
            "stream",
            msgpack.packb((self._position_after.marks, self._position_after.numbers, ended)),
        )
        for rank, body in enumerate(bodies):
            if body != bodies[0]:
                raise DataError(
                    f"the stream is not the same on all workers: up to step {index} rank {rank} "
                    "read other samples than rank 0. Shuffle by the same seed on all workers; "
                    'if each rank is meant to have its own samples, pass shard="mine"'
                )


def check_stream(terms: LoaderSpec) -> None:
    """Raise `DataError` if a stream can't be dealt on these terms."""
    dataset = terms.loader.dataset
    name = type(dataset).__qualname__
    if terms.shard is not None and (
        wrong := describe_unknown_choice("shard", terms.shard, Sharding)
    ):
        raise DataError(
            f"{wrong} (mine: the stream gives each rank its own samples; none: it does not)"
        )
    if isinstance(dataset, IterDataPipe) and not terms.is_alone:
        raise DataError(
            f"a {name} is a datapipe, which torch shards by itself: "
            "give a plain torch.utils.data.IterableDataset"
        )
    sign = None if terms.shard is not None else _find_self_sharding(dataset, 3)
    if sign is not None:
        raise DataError(
            f"the stream {name} shards itself by rank ({sign}): leave that out, and each worker "
            'takes its share of the whole; or pass shard="mine" to keep it. '
            'If it does not shard, pass shard="none"'
        )


def _make_access(terms: LoaderSpec) -> StreamAccess:
    if terms.shard == "mine" and not terms.is_alone:
        return SelfSharded(terms)
    return ReadAll(terms)


def _find_self_sharding(value: Any, depth: int) -> str | None:
    """Find a sign that a stream divides itself by rank; None if there is none.

    Looks at names of functions and classes, and at ranks and sizes in attributes, `depth` levels
    deep.
    """
    # Functions and classes with known names: webdataset, datasets of Hugging Face, torch.
    called_name = getattr(value.func if isinstance(value, partial) else value, "__name__", "")
    if called_name in {"split_by_node", "split_dataset_by_node"}:
        return called_name
    if "DistributedSampler" in type(value).__qualname__:
        return type(value).__qualname__
    fields = getattr(value, "__dict__", None) or {}
    distributed = fields.get("_distributed")
    if getattr(distributed, "world_size", 1) > 1:
        return "split_dataset_by_node"
    # A rank beside a number of workers, in any object of the script's.
    sizes = [
        name
        for name in ("world_size", "num_replicas")
        if type(fields.get(name)) is int and fields[name] > 1
    ]
    if sizes and type(fields.get("rank")) is int:
        return f"it holds a rank, and {sizes[0]}={fields[sizes[0]]}"
    for attribute in fields.values():
        items = attribute if isinstance(attribute, list | tuple) else [attribute]
        for item in items if depth else []:
            sign = (
                None
                if isinstance(item, torch.Tensor | torch.nn.Module)
                else _find_self_sharding(item, depth - 1)
            )
            if sign is not None:
                return sign
    return None
