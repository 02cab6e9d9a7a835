"""Checkpoints of a run, which the first worker writes: at once, or in a background thread.

run.save()                   | collect | write, hash, sync, prune |  train ...
run.save(background=True)    | collect | copy |  train ...
                                       thread | write, hash, sync, prune |

If models are cut, each worker writes its own part of them into a folder. The first worker gives the
folder its name once all parts are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch.optim import Optimizer

from paceline.checkpoint import best
from paceline.checkpoint import tables as stored
from paceline.checkpoint.files import catalogue, checkpoint
from paceline.checkpoint.files.background import BackgroundWrite
from paceline.checkpoint.files.file_layout import CopyMemory, FileLayout, image, received
from paceline.checkpoint.files.manifest import Metric
from paceline.checkpoint.parts import CutParts, PendingParts
from paceline.checkpoint.state import WorkerState
from paceline.data.loader import ShareLoader
from paceline.errors import CheckpointError
from paceline.prepare.checks import strangely_scheduled
from paceline.record.folder import RunFolder, script_name
from paceline.record.history import RunHistory
from paceline.servers.run_tables import RunTables
from paceline.state.snapshot import Snapshot, byte_tensor, loads
from paceline.state.versioned import Stateful, Versioned
from paceline.sync.context import SyncContext

# seconds before the others' deadline at which the first worker gives up, so that its own error says
# what it waited for
EARLIER = 10.0


def patience(deadline: float) -> float:
    """Seconds that the first worker waits for a disk; the others wait `deadline` seconds for it."""
    return max(deadline - EARLIER, deadline / 2)


@dataclass
class SaveTally:
    """Counts and times of the checkpoints of this run, as the first worker keeps them."""

    count: int = 0  # on the disk
    stall_seconds: float = 0.0  # for which training stood still
    write_seconds: float = 0.0  # of writing, in the background or not
    nbytes: int = 0
    background: int = 0  # of those that were begun, how many were asked for in the background


@dataclass(frozen=True)
class SaveRequest:
    """Where one checkpoint is to be written, and how."""

    folder: Path
    step: int
    keep: int
    background: bool
    metric: Metric | None = None  # by which it may be the best


class CheckpointSaver:
    """Saves and resumes `state`, which all workers share, and `own`, which each worker has for
    itself.

    `history` is told of each checkpoint, and of those that went wrong.
    """

    def __init__(
        self,
        state: Versioned,
        own: WorkerState,
        context: SyncContext,
        history: RunHistory,
        *,
        parts: CutParts,
        tables: RunTables,
        deadline: float,
        pinned: bool,
    ) -> None:
        self._state, self._own, self._context, self._history, self._parts = (
            state,
            own,
            context,
            history,
            parts,
        )
        self._agreement = parts.agreement  # of all workers
        self._patience = patience(deadline)
        self._tables, self._pinned = tables, pinned
        self._memory: CopyMemory | None = None
        self._writing: BackgroundWrite | None = None
        self._failure: CheckpointError | None = None  # in the background, not raised yet
        self._promised: Path | None = None  # what the last save in the background is to become
        self._tally = SaveTally()
        self._said = set[str]()
        self._best = best.BestCheckpoint(context.announce)

    def save(self, order: SaveRequest) -> Path:
        """Write a checkpoint, or begin one in the background, and return its path on all workers.

        Collective.
        """
        began = time.perf_counter()
        checkpoint.check(order.step, order.keep)
        for text in left_out(self._state.parts, self._said):
            self._context.announce(text)
        asked = order.background
        if asked and self._tables.kept:
            self._context.announce(
                "with sparse tables a checkpoint is written at once, background=True or not: "
                "training waits for the disk"
            )
            order = replace(order, background=False)
        # by this worker: once, however often others are lost in the call
        begun: list[tuple[str, str]] = []

        def first(
            order: SaveRequest, own: dict[int, FileLayout], cut: PendingParts | None
        ) -> bytes:
            if not begun:
                missed = self._missed()
                self.settle()
                self._tally.background += asked
                begun.append((str(self._begin(order, own, cut)), missed))
            return bytes(msgpack.packb([*begun[0], *astuple(self._tally)]))

        def act() -> str:
            self._own.abilities.converge()
            own, metric = self._collect(order.metric)
            if metric is not None:
                self._agreement.tell_everyone(
                    "run.save, its metric", lambda: self._prove(order.folder, metric)
                )
            cut = self._begin_parts(order) if self._parts.layout.is_cut else None
            what = "run.save, begun" if order.background else "run.save, written"
            path, missed, *counted = msgpack.unpackb(
                self._agreement.tell_everyone(
                    what, lambda: first(replace(order, metric=metric), own, cut)
                )
            )
            self._tally = SaveTally(*counted)
            if missed:
                self._history.note_event(missed)
            return str(path)

        path = Path(self._agreement.attempt_call(act))
        self._promised = path if order.background else None
        self._tally.stall_seconds += time.perf_counter() - began
        self._history.note_checkpoint(path.name, order.step, background=order.background)
        return path

    def _prove(self, folder: Path, metric: Metric) -> bytes:
        """Raise `UsageError` for a metric that can't be compared with those of earlier
        checkpoints.
        """
        self.settle()
        self._best.check(folder, metric)
        return b""

    def _begin_parts(self, order: SaveRequest) -> PendingParts:
        """Write this worker's part of what is cut, or begin to; the first worker's goes with the
        rest. Collective.
        """
        cut = self._parts.reserve(order.folder, self._state, self.settle)
        if self._agreement.group.rank and cut.mine is not None and order.background:
            self.wait()
            self._failure = None  # the first worker has raised it
            self._memory = self._memory or CopyMemory(pinned=self._pinned)
            held = cut.held(self._memory, 0)
            self._writing = BackgroundWrite(
                f"the part of step {order.step}", held.nbytes, held.leave, self._context.announce
            )
        if not order.background:
            self._parts.write(cut)
        return cut

    def _begin(
        self, order: SaveRequest, own: dict[int, FileLayout], cut: PendingParts | None
    ) -> Path:
        folder, step, keep = order.folder, order.step, order.keep
        state = image(self._state.snapshot(copy=False) if cut is None else cut.rest)
        nbytes = state.nbytes + (0 if cut is None else cut.total)
        at = None if cut is None else cut.place
        if not order.background:
            began = time.perf_counter()
            more = stored.images(self._tables.kept)
            blocks = None if cut is None else cut.collect
            write_now = partial(
                checkpoint.write,
                folder,
                state,
                step,
                own=own,
                keep=keep,
                more=more,
                at=at,
                blocks=blocks,
                metric=order.metric,
            )
            path = self._best.follow(folder, order.metric, write_now)
            self._count(nbytes, time.perf_counter() - began)
            return path
        self._memory = self._memory or CopyMemory(pinned=self._pinned)
        state = state.hold(self._memory, 0)
        own[self._agreement.group.rank] = own[self._agreement.group.rank].hold(self._memory, 1)
        held = None if cut is None or cut.mine is None else cut.held(self._memory, 2)
        target = catalogue.free(folder, step)

        def write(moved: Callable[[int], None]) -> Path:
            before = partial(held.leave, moved) if held is not None else lambda: None
            blocks = None if cut is None else partial(cut.collect, before=before)
            options: dict[str, Any] = {
                "target": target,
                "moved": moved,
                "at": at,
                "blocks": blocks,
                "metric": order.metric,
            }
            return self._best.follow(
                folder,
                order.metric,
                partial(checkpoint.write, folder, state, step, own=own, keep=keep, **options),
            )

        self._writing = BackgroundWrite(f"step {step}", nbytes, write, self._context.announce)
        return target

    def _count(self, nbytes: int, seconds: float) -> None:
        self._tally.count += 1
        self._tally.write_seconds += seconds
        self._tally.nbytes += nbytes

    # ---- in the background

    def wait(self) -> None:
        """Wait for a write under way on this worker, up to the deadline.

        If it fails, `last` raises the error.
        """
        writing = self._writing
        if writing is None:
            if missed := self._missed():
                self._history.note_event(missed)
            return
        if writing.wait(self._patience):
            self._writing, self._promised = None, None
        self._failure = writing.failure()
        if self._failure is None:
            self._count(writing.nbytes, writing.seconds)
        else:
            self._history.note_event(str(self._failure))

    def settle(self) -> None:
        """Wait for a write under way on this worker, and raise the error that it failed with."""
        self.wait()
        self.last()

    def last(self) -> bytes:
        """Raise, once, the error that a write in the background failed with.

        Returns no bytes, as agreements carry bytes.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return b""

    def _missed(self) -> str:
        """Words, once, for a checkpoint that was lost with the worker that wrote it; else empty."""
        promised = self._promised
        if promised is None or self._writing is not None or self._agreement.group.rank != 0:
            return ""
        self._promised = None
        text = (
            "" if promised.exists() else f"{promised.name} was lost with the worker that wrote it"
        )
        if text:
            self._context.announce(text)
        return text

    def tally(self) -> dict[str, float]:
        """Return the counts and times."""
        return asdict(self._tally)

    def facts(self, folder: Path) -> dict[str, Any]:
        """Facts about the checkpoints in `folder` for the summary: counts, times, and the best
        one.
        """
        return {**asdict(self._tally), **self._best.facts(folder)}

    def end(self) -> None:
        """Wait for a write under way and free its memory, as the run ends."""
        self.wait()
        self._memory = None

    # ---- coming back

    def resume(self, folders: Sequence[Path], *, named: bool = True) -> Path | None:
        """Load the newest complete checkpoint of the first folder that has one. Collective.

        Returns its path on all workers, or None. `named` says whether the run was given a name, or
        folders were requested; it only changes the announcement.
        """
        context, own, cut = self._context, self._own, self._parts.layout.is_cut
        found: list[checkpoint.Checkpoint] = []

        def read() -> bytes:
            self.settle()
            folder = next((folder for folder in folders if catalogue.newest(folder)), None)
            if folder is None:
                context.announce(_nothing(folders, named=named))
                return bytes(msgpack.packb(None))
            found.append(checkpoint.load(folder, say=context.announce, lazy=cut))
            return bytes(msgpack.packb([str(found[0].path), sorted(found[0].own)]))

        head = msgpack.unpackb(self._agreement.tell_everyone("run.resume", read))
        if head is None:
            return None
        shared = None if not found else self._parts.describe(found[0]) if cut else found[0].snapshot
        bodies = (
            [shared, *(found[0].own[rank] for rank in head[1])]
            if found
            else [None] * (1 + len(head[1]))
        )
        snapshots = [self._hand_out(body) for body in bodies]
        state = self._parts.read(Path(head[0]), snapshots[0], self._state) if cut else snapshots[0]
        if lacking := self._state.restore(state):
            context.announce(
                f"{Path(head[0]).name} has no {', '.join(lacking)}, as an earlier version wrote "
                "it: they stay as they are"
            )
        for loader in [part for part in self._state.parts if isinstance(part, ShareLoader)]:
            loader.begin_anew()
        own.load(self._agreement.group.rank, dict(zip(head[1], snapshots[1:], strict=True)))
        if self._tables.kept and not self._tables.waiting:
            self._agreement.tell_everyone(
                "run.resume, sparse tables", lambda: stored.restore(self._tables.kept, found[0])
            )
            self._tables.forget()
        if self._agreement.group.size > len(head[1]):
            context.announce(
                f"the checkpoint was written by {len(head[1])} workers: the random generators of "
                "the others go on as they are"
            )
        self._best.resumed(Path(head[0]).parent)
        return Path(head[0])

    # ---- between workers

    def _collect(self, metric: Metric | None) -> tuple[dict[int, FileLayout], Metric | None]:
        """Bring what each worker has for itself to the first one, which gets it by rank (the
        others get nothing), and agree on a metric.
        """
        agreement, group = self._agreement, self._agreement.group
        mine, first = image(self._own.snapshot()), group.rank == 0
        body = torch.empty(0, dtype=torch.uint8) if first else mine.dump()
        answers = agreement.meet("run.save", msgpack.packb([body.nbytes, best.to_plain(metric)]))
        lengths, given = zip(*map(msgpack.unpackb, answers), strict=True)
        metric, odd = best.agreed([best.from_plain(each) for each in given])
        self._best.doubt(odd)
        found = {
            rank: torch.empty(length, dtype=torch.uint8)
            for rank, length in enumerate(lengths)
            if first and rank
        }
        group.exchange([] if first else [(0, body)], list(found.items())).wait()
        return {group.rank: mine} | {rank: received(body) for rank, body in found.items()}, metric

    def _hand_out(self, body: Snapshot | None) -> Snapshot:
        """Send the first worker's snapshot to all workers."""
        agreement, group = self._agreement, self._agreement.group
        if group.size == 1:
            assert body is not None
            return body
        data = body.dumps() if body is not None else b""
        nbytes = int.from_bytes(
            agreement.tell_everyone("run.resume, size", lambda: len(data).to_bytes(8, "little")),
            "little",
        )
        buffer = byte_tensor(data) if data else torch.empty(nbytes, dtype=torch.uint8)
        group.broadcast(buffer, name="run.resume").wait()
        return body if body is not None else loads(buffer.numpy().tobytes())


def left_out(parts: Sequence[Stateful], said: set[str]) -> Iterator[str]:
    """Say of which optimizers no scheduler is in checkpoints, each once, as `said` grows."""
    for optimizer in strangely_scheduled(
        [part for part in parts if isinstance(part, Optimizer)], parts
    ):
        if (name := type(optimizer).__qualname__) not in said:
            said.add(name)
            yield (
                f"a learning rate scheduler of the {name} was not given to run.prepare, so "
                "checkpoints don't say where it is, and it "
                "begins anew in a run that is resumed unless the script sees to that; "
                "give it to run.prepare, too"
            )


def _nothing(folders: Sequence[Path], *, named: bool) -> str:
    """Say that no checkpoint was found in these folders, and where there is one."""
    found = "nothing to resume, training begins anew: "
    found += (
        f"no checkpoint in {', '.join(map(str, folders))}"
        if named
        else "this run was given no name that an earlier one could have had"
    )
    root = folders[0].parent.parent
    places = sorted(
        (place for place in root.glob("*/checkpoints") if place.is_dir()),
        key=lambda place: place.stat().st_mtime,
    )
    # None: it isn't known
    mine = [place for place in places if RunFolder(place.parent).script in (script_name(), None)]
    last = next((kept[0] for place in reversed(mine) if (kept := catalogue.newest(place))), None)
    there = f"no run of {script_name()} in {root} has one"
    if last is not None:
        there = f"the newest is {last}: run.resume({str(last.parent.parent)!r}) goes on from it"
    return f"{found}; {there}" if named else f"{found}, such as start(name='mine'); {there}"
