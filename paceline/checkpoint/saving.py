"""Saves and resumes a run. The first worker writes checkpoints, at once or in the background.

run.save()                   | collect | write, hash, sync, prune |  train ...
run.save(background=True)    | collect | copy |  train ...
                                       thread | write, hash, sync, prune |

If models are cut, each worker writes its own part of them into one temporary folder. The first
worker renames this folder once all parts are in it.
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
from paceline.checkpoint.files.file_layout import (
    CopyMemory,
    FileLayout,
    lay_out_snapshot,
    unpack_layout,
)
from paceline.checkpoint.files.manifest import Metric
from paceline.checkpoint.parts import CutParts, PendingParts
from paceline.checkpoint.state import WorkerState
from paceline.data.loader import ShareLoader
from paceline.errors import CheckpointError
from paceline.prepare.checks import find_unprepared_schedules
from paceline.record.folder import RunFolder, script_name
from paceline.record.history import RunHistory
from paceline.record.outcome.worker_time import WorkerTime
from paceline.servers.run_tables import RunTables
from paceline.state.snapshot import Snapshot, copy_to_tensor, snapshot_from_bytes
from paceline.state.versioned import Stateful, VersionedState
from paceline.sync.context import SyncContext

# The first worker gives up this number of seconds before the deadline of the other workers. So the
# error that users see is its own, which says what it waited for.
WRITER_MARGIN = 10.0
DEFAULT_KEEP = 3


def compute_write_timeout(deadline: float) -> float:
    """Seconds that the first worker waits for a disk.

    The other workers wait `deadline` seconds for the first worker.
    """
    return max(deadline - WRITER_MARGIN, deadline / 2)


@dataclass
class SaveTally:
    """Counts and times of the checkpoints of this run. The first worker keeps them."""

    count: int = 0  # checkpoints on the disk
    stall_seconds: float = 0.0  # time in which training stood still
    write_seconds: float = 0.0  # time of writing, in the background or not
    nbytes: int = 0  # bytes written
    background: int = 0  # checkpoints that were requested in the background and begun


@dataclass(frozen=True)
class SaveRequest:
    """One checkpoint to be written: its folder, its step and its options."""

    folder: Path
    step: int
    keep: int
    background: bool
    metric: Metric | None = None  # decides whether it is the best checkpoint


class CheckpointSaver:
    """Saves and resumes the state of a run.

    Invariants:
        - `_background_write` is set while a thread of this worker writes.
        - `_promised_path` is set on all workers by a save in the background. It stays until the
          write is over on the worker that writes, and until the next save on the others.
        - `_background_error` has the error of a failed write until `raise_write_error` raises it.
        - `_tally` is the same on all workers after a save, so that any of them can become the
          first worker.

    Args:
        state: State that all workers share.
        own: State that belongs to this worker alone, such as its random generators.
        context: Announces messages to the user.
        history: Records each checkpoint, and each that failed.
        worker_time: Measures the time in which training stands still.
        parts: Writes and reads the parts of models that are cut.
        tables: The sparse tables of the run.
        deadline: Seconds that workers wait for each other.
        pinned: Whether background copies use pinned memory.
    """

    def __init__(
        self,
        state: VersionedState,
        own: WorkerState,
        context: SyncContext,
        history: RunHistory,
        worker_time: WorkerTime,
        *,
        parts: CutParts,
        tables: RunTables,
        deadline: float,
        pinned: bool,
    ) -> None:
        self._state, self._worker_state, self._context, self._history, self._cut_parts = (
            state,
            own,
            context,
            history,
            parts,
        )
        self._worker_time = worker_time
        self._agreement = parts.agreement  # between all workers
        self._write_timeout = compute_write_timeout(deadline)
        self._tables, self._pinned = tables, pinned
        self._copy_memory: CopyMemory | None = None
        self._background_write: BackgroundWrite | None = None
        self._background_error: CheckpointError | None = None
        self._promised_path: Path | None = None
        self._tally = SaveTally()
        self.latest_keep = DEFAULT_KEEP  # newest checkpoints that stay, as last requested
        self._warned_optimizers = set[str]()
        self._best_checkpoint = best.BestCheckpoint(context.announce)

    def save(self, order: SaveRequest) -> Path:
        """Write a checkpoint, or begin one in the background. Collective.

        Returns the path of the checkpoint on all workers.
        """
        with self._worker_time.measure_loss("checkpoint"):
            return self._save_measured(order)

    def _save_measured(self, order: SaveRequest) -> Path:
        """Write a checkpoint, or begin one in the background. Collective."""
        began = time.perf_counter()
        checkpoint.check_save_options(order.step, order.keep)
        self.latest_keep = order.keep
        for text in describe_missing_schedulers(self._state.parts, self._warned_optimizers):
            self._context.announce(text)
        in_background = order.background
        if in_background and self._tables.tables:
            self._context.announce(
                "with sparse tables a checkpoint is written at once, background=True or not: "
                "training waits for the disk"
            )
            order = replace(order, background=False)
        # `save_together` runs again if another worker is lost in the call. This list makes sure
        # that the first worker begins only one checkpoint.
        first_result: list[tuple[str, str]] = []

        def begin_once(
            order: SaveRequest, own: dict[int, FileLayout], pending_parts: PendingParts | None
        ) -> bytes:
            if not first_result:
                lost_notice = self._report_lost_checkpoint()
                self.finish_write()
                self._tally.background += in_background
                first_result.append(
                    (str(self._begin_checkpoint(order, own, pending_parts)), lost_notice)
                )
            return bytes(msgpack.packb([*first_result[0], *astuple(self._tally)]))

        def save_together() -> str:
            # 1. Bring everything that belongs to one worker alone to the first worker.
            self._worker_state.abilities.converge()
            own, metric = self._collect_worker_states(order.metric)
            if metric is not None:
                self._agreement.tell_everyone(
                    "run.save, its metric", lambda: self._check_metric(order.folder, metric)
                )
            # 2. Each worker writes its part of cut models, or begins to.
            pending_parts = self._begin_own_part(order) if self._cut_parts.layout.is_cut else None
            # 3. The first worker writes the rest, or begins to. All workers learn the path and the
            # tally, so that any of them can take over from the first worker.
            call_name = "run.save, begun" if order.background else "run.save, written"
            path, lost_notice, *tally_values = msgpack.unpackb(
                self._agreement.tell_everyone(
                    call_name, lambda: begin_once(replace(order, metric=metric), own, pending_parts)
                )
            )
            self._tally = SaveTally(*tally_values)
            if lost_notice:
                self._history.note_event(lost_notice)
            return str(path)

        path = Path(self._agreement.attempt_call(save_together))
        self._promised_path = path if order.background else None
        self._tally.stall_seconds += time.perf_counter() - began
        self._history.note_checkpoint(path.name, order.step, background=order.background)
        return path

    def _check_metric(self, folder: Path, metric: Metric) -> bytes:
        """Raise `UsageError` if `metric` can't be compared with those of earlier checkpoints."""
        self.finish_write()
        self._best_checkpoint.check_direction(folder, metric)
        return b""

    def _begin_own_part(self, order: SaveRequest) -> PendingParts:
        """Write this worker's part of the cut models, or begin to. Collective.

        In the background, the first worker writes its part together with the rest of the state.
        """
        pending_parts = self._cut_parts.reserve_folder(order.folder, self._state, self.finish_write)
        if self._agreement.group.rank and pending_parts.own_layout is not None and order.background:
            self.wait_for_write()
            # The first worker has raised the same error on all workers.
            self._background_error = None
            self._copy_memory = self._copy_memory or CopyMemory(pinned=self._pinned)
            part_copy = pending_parts.copy_part(self._copy_memory, 0)
            self._background_write = BackgroundWrite(
                f"the part of step {order.step}",
                part_copy.nbytes,
                part_copy.write_part,
                self._context.announce,
            )
        if not order.background:
            self._cut_parts.write_parts(pending_parts)
        return pending_parts

    def _begin_checkpoint(
        self, order: SaveRequest, worker_layouts: dict[int, FileLayout], cut: PendingParts | None
    ) -> Path:
        """Write the checkpoint on the first worker, or begin to. Returns its path.

        Args:
            order: The checkpoint.
            worker_layouts: State of each single rank.
            cut: The parts of cut models, or None if no model is cut.
        """
        folder, step, keep = order.folder, order.step, order.keep
        layout = lay_out_snapshot(
            self._state.take_snapshot(copy=False) if cut is None else cut.uncut_state
        )
        nbytes = layout.nbytes + (0 if cut is None else cut.total_nbytes)
        reserved_folder = None if cut is None else cut.folder
        if not order.background:
            write_start = time.perf_counter()
            extra_layouts = stored.lay_out_tables(self._tables.tables)
            blocks = None if cut is None else cut.collect_parts
            write_now = partial(
                checkpoint.write_checkpoint,
                folder,
                layout,
                step,
                own=worker_layouts,
                keep=keep,
                more=extra_layouts,
                at=reserved_folder,
                blocks=blocks,
                metric=order.metric,
            )
            path = self._best_checkpoint.write_and_announce(folder, order.metric, write_now)
            self._count_write(nbytes, time.perf_counter() - write_start)
            return path
        # Training goes on while the thread writes, so the thread gets copies of all tensors.
        self._copy_memory = self._copy_memory or CopyMemory(pinned=self._pinned)
        layout = layout.copy_into(self._copy_memory, 0)
        worker_layouts[self._agreement.group.rank] = worker_layouts[
            self._agreement.group.rank
        ].copy_into(self._copy_memory, 1)
        part_copy = (
            None if cut is None or cut.own_layout is None else cut.copy_part(self._copy_memory, 2)
        )
        target = catalogue.choose_free_path(folder, step)

        def write_in_background(moved: Callable[[int], None]) -> Path:
            # This worker writes its part first. `collect_parts` then waits for all other parts.
            write_own_part = (
                partial(part_copy.write_part, moved) if part_copy is not None else lambda: None
            )
            blocks = None if cut is None else partial(cut.collect_parts, before=write_own_part)
            options: dict[str, Any] = {
                "target": target,
                "moved": moved,
                "at": reserved_folder,
                "blocks": blocks,
                "metric": order.metric,
            }
            return self._best_checkpoint.write_and_announce(
                folder,
                order.metric,
                partial(
                    checkpoint.write_checkpoint,
                    folder,
                    layout,
                    step,
                    own=worker_layouts,
                    keep=keep,
                    **options,
                ),
            )

        self._background_write = BackgroundWrite(
            f"step {step}", nbytes, write_in_background, self._context.announce
        )
        return target

    def _count_write(self, nbytes: int, seconds: float) -> None:
        self._tally.count += 1
        self._tally.write_seconds += seconds
        self._tally.nbytes += nbytes

    # ---- in the background

    def wait_for_write(self) -> None:
        """Wait for a write under way on this worker, up to the deadline.

        If the write fails, `raise_write_error` raises the error.
        """
        writing = self._background_write
        if writing is None:
            if missed := self._report_lost_checkpoint():
                self._history.note_event(missed)
            return
        if writing.wait_until_ended(self._write_timeout):
            self._background_write, self._promised_path = None, None
        self._background_error = writing.explain_failure()
        if self._background_error is None:
            self._count_write(writing.nbytes, writing.seconds)
        else:
            self._history.note_event(str(self._background_error))

    def finish_write(self) -> None:
        """Wait for a write under way on this worker, and raise its error if it failed."""
        self.wait_for_write()
        self.raise_write_error()

    def raise_write_error(self) -> bytes:
        """Raise the error of a failed background write, once.

        Returns empty bytes, because agreements carry bytes.
        """
        failure, self._background_error = self._background_error, None
        if failure is not None:
            raise failure
        return b""

    def _report_lost_checkpoint(self) -> str:
        """Announce, once, that a checkpoint was lost with the worker that wrote it.

        Returns the announcement, or an empty text if no checkpoint was lost.
        """
        # A first worker with a promised path and without a write of its own has just become the
        # first one: the first worker before it was lost, maybe while it wrote.
        promised = self._promised_path
        if (
            promised is None
            or self._background_write is not None
            or self._agreement.group.rank != 0
        ):
            return ""
        self._promised_path = None
        text = (
            "" if promised.exists() else f"{promised.name} was lost with the worker that wrote it"
        )
        if text:
            self._context.announce(text)
        return text

    def copy_tally(self) -> dict[str, float]:
        """Copy the counts and times into a dict."""
        return asdict(self._tally)

    def summary_facts(self, folder: Path) -> dict[str, Any]:
        """Facts for the summary: counts, times, and the best checkpoint in `folder`."""
        return {**asdict(self._tally), **self._best_checkpoint.summary_facts(folder)}

    def close(self) -> None:
        """Wait for a write under way and free the memory of copies, as the run ends."""
        self.wait_for_write()
        self._copy_memory = None

    # ---- resuming

    def resume_newest(self, folders: Sequence[Path], *, named: bool = True) -> Path | None:
        """Load the newest complete checkpoint of the first folder that has one. Collective.

        Args:
            folders: Folders of checkpoints, in the order of preference.
            named: Whether the user has named the run or a folder. Changes only the announcement.

        Returns:
            The path of the checkpoint, on all workers. None if there is none.
        """
        context, worker_state, is_cut = (
            self._context,
            self._worker_state,
            self._cut_parts.layout.is_cut,
        )
        loaded: list[checkpoint.Checkpoint] = []

        def read() -> bytes:
            self.finish_write()
            folder = next((folder for folder in folders if catalogue.list_newest(folder)), None)
            if folder is None:
                context.announce(_describe_no_checkpoint(folders, named=named))
                return bytes(msgpack.packb(None))
            loaded.append(checkpoint.load_checkpoint(folder, say=context.announce, lazy=is_cut))
            return bytes(msgpack.packb([str(loaded[0].path), sorted(loaded[0].worker_snapshots)]))

        # 1. Only the first worker reads the disk. The others learn the path, and for which ranks
        # the checkpoint has states.
        header = msgpack.unpackb(self._agreement.tell_everyone("run.resume", read))
        if header is None:
            return None
        # 2. The first worker sends all snapshots to all workers, one after the other. For cut
        # models it sends only the places of tensors, and each worker reads its part from the disk.
        shared = (
            None
            if not loaded
            else self._cut_parts.pack_places(loaded[0])
            if is_cut
            else loaded[0].snapshot
        )
        bodies = (
            [shared, *(loaded[0].worker_snapshots[rank] for rank in header[1])]
            if loaded
            else [None] * (1 + len(header[1]))
        )
        snapshots = [self._broadcast_snapshot(body) for body in bodies]
        state = (
            self._cut_parts.read_parts(Path(header[0]), snapshots[0], self._state)
            if is_cut
            else snapshots[0]
        )
        # 3. Load the state that is shared, then the state of this worker.
        if missing_names := self._state.restore_snapshot(state):
            context.announce(
                f"{Path(header[0]).name} has no {', '.join(missing_names)}, as an earlier version "
                "of paceline wrote it; they stay as they are"
            )
        for loader in [part for part in self._state.parts if isinstance(part, ShareLoader)]:
            loader.restart_evaluation()
        worker_state.load_worker_states(
            self._agreement.group.rank, dict(zip(header[1], snapshots[1:], strict=True))
        )
        if self._tables.tables and not self._tables.is_waiting:
            self._agreement.tell_everyone(
                "run.resume, sparse tables",
                lambda: stored.restore_tables(self._tables.tables, loaded[0]),
            )
            self._tables.discard_prefetched()
        if self._agreement.group.size > len(header[1]):
            context.announce(
                f"the checkpoint was written by {len(header[1])} workers: the random generators of "
                "the other workers stay as they are"
            )
        self._best_checkpoint.remember_resumed_folder(Path(header[0]).parent)
        return Path(header[0])

    # ---- between workers

    def _collect_worker_states(
        self, metric: Metric | None
    ) -> tuple[dict[int, FileLayout], Metric | None]:
        """Send the state of each worker to the first one, and agree on a metric.

        Returns the states by rank on the first worker, and only its own state on any other.
        """
        agreement, group = self._agreement, self._agreement.group
        own_layout, is_first = lay_out_snapshot(self._worker_state.pack_snapshot()), group.rank == 0
        body = torch.empty(0, dtype=torch.uint8) if is_first else own_layout.pack_bytes()
        answers = agreement.meet(
            "run.save", msgpack.packb([body.nbytes, best.encode_metric(metric)])
        )
        lengths, metrics = zip(*map(msgpack.unpackb, answers), strict=True)
        metric, difference = best.choose_metric([best.decode_metric(packed) for packed in metrics])
        self._best_checkpoint.warn_once(difference)
        bodies = {
            rank: torch.empty(length, dtype=torch.uint8)
            for rank, length in enumerate(lengths)
            if is_first and rank
        }
        # All lengths are known on the first worker, so one exchange receives all states.
        group.exchange([] if is_first else [(0, body)], list(bodies.items())).wait()
        return {group.rank: own_layout} | {
            rank: unpack_layout(body) for rank, body in bodies.items()
        }, metric

    def _broadcast_snapshot(self, body: Snapshot | None) -> Snapshot:
        """Send the first worker's snapshot to all workers."""
        agreement, group = self._agreement, self._agreement.group
        if group.size == 1:
            assert body is not None
            return body
        data = body.to_bytes() if body is not None else b""
        nbytes = int.from_bytes(
            agreement.tell_everyone("run.resume, size", lambda: len(data).to_bytes(8, "little")),
            "little",
        )
        buffer = copy_to_tensor(data) if data else torch.empty(nbytes, dtype=torch.uint8)
        group.broadcast(buffer, name="run.resume").wait()
        return body if body is not None else snapshot_from_bytes(buffer.numpy().tobytes())


def describe_missing_schedulers(parts: Sequence[Stateful], warned: set[str]) -> Iterator[str]:
    """Yield a warning for each optimizer whose scheduler is not in checkpoints.

    `warned` has the names of optimizers that had their warning. The new ones are added to it.
    """
    for optimizer in find_unprepared_schedules(
        [part for part in parts if isinstance(part, Optimizer)], parts
    ):
        if (name := type(optimizer).__qualname__) not in warned:
            warned.add(name)
            yield (
                f"a learning rate scheduler of the {name} was not given to run.prepare, so "
                "checkpoints don't contain it, and it begins anew when a run resumes; "
                "give it to run.prepare, too"
            )


def _describe_no_checkpoint(folders: Sequence[Path], *, named: bool) -> str:
    """Describe that these folders have no checkpoint, and name another run that has one."""
    text = "nothing to resume, training begins anew: "
    text += (
        f"no checkpoint in {', '.join(map(str, folders))}"
        if named
        else "this run has no name that an earlier run could have had"
    )
    # Look for the newest checkpoint of the same script in other runs' folders.
    root = folders[0].parent.parent
    places = sorted(
        (place for place in root.glob("*/checkpoints") if place.is_dir()),
        key=lambda place: place.stat().st_mtime,
    )
    # A folder whose script isn't known (None) counts as one of this script.
    same_script = [
        place for place in places if RunFolder(place.parent).script in (script_name(), None)
    ]
    newest = next(
        (
            checkpoints[0]
            for place in reversed(same_script)
            if (checkpoints := catalogue.list_newest(place))
        ),
        None,
    )
    hint = f"no run of {script_name()} in {root} has one"
    if newest is not None:
        hint = f"the newest is {newest}: run.resume({str(newest.parent.parent)!r}) goes on from it"
    return f"{text}; {hint}" if named else f"{text}, such as start(name='mine'); {hint}"
