"""Writes and reads checkpoints in parts: with cut models, each worker has its own part.

            reserve_folder      write_parts                            the first worker
worker 0    makes a folder -->  its part, and all uncut tensors  -->   waits for all parts, renames
                                                                       the folder
worker 1                   -->  its part
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.cut_state import read_local_state, split_state
from paceline.checkpoint.files import pending
from paceline.checkpoint.files.block_files import BlockReader, BlocksLayout, lay_out_blocks
from paceline.checkpoint.files.checkpoint import Checkpoint
from paceline.checkpoint.files.file_layout import CopyMemory
from paceline.checkpoint.files.pending import WrittenBlocks
from paceline.checkpoint.layout import StateLayout
from paceline.comm.agreement import Agreement, act_together
from paceline.errors import CheckpointError
from paceline.state.blocks import index_from_json, index_to_json
from paceline.state.snapshot import Snapshot
from paceline.state.versioned import VersionedState

SHARED_FOLDER_HINT = "put runs on a file system that all hosts share, with pl.start(folder=...)"


@dataclass(frozen=True)
class PartCopy:
    """Copy of a worker's part, to be written while training goes on."""

    folder: Path
    rank: int
    layout: BlocksLayout

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.layout.layout.nbytes

    def write_part(self, moved: Callable[[int], None] = lambda nbytes: None) -> None:
        """Write the part, and a note about it for the first worker. Raises `CheckpointError`."""
        pending.write_part(self.folder, self.rank, self.layout, moved)


@dataclass(frozen=True)
class PendingParts:
    """A checkpoint that has a folder, but no parts yet.

    Attributes:
        folder: The temporary folder.
        rank: Rank of this worker.
        uncut_state: State without tensors of cut parameters.
        own_layout: Part of this worker, or None if it writes none.
        writer_ranks: Ranks of the workers that write parts.
        total_nbytes: Bytes of the parts of all workers.
        timeout_seconds: Seconds that the first worker waits for all parts.
    """

    folder: Path
    rank: int
    uncut_state: Snapshot
    own_layout: BlocksLayout | None
    writer_ranks: list[int]
    total_nbytes: int
    timeout_seconds: float

    def copy_part(self, room: CopyMemory, number: int) -> PartCopy:
        """Copy this worker's part into the block `number` of `room`."""
        assert self.own_layout is not None
        copied = self.own_layout.layout.copy_into(room, number)
        return PartCopy(
            self.folder,
            self.rank,
            BlocksLayout(self.own_layout.file, copied, self.own_layout.index),
        )

    def collect_parts(
        self, place: Path, before: Callable[[], None] = lambda: None
    ) -> list[WrittenBlocks]:
        """Call `before`, then wait for the parts of all workers. Returns their contents."""
        before()
        return pending.collect_parts(place, self.writer_ranks, self.timeout_seconds)


class CutParts:
    """Writes and reads the parts of checkpoints.

    Args:
        agreement: Brings all workers together.
        layout: The workers that hold and write each part.
        seconds: Seconds that the first worker waits for the parts of all workers.
    """

    def __init__(self, agreement: Agreement, layout: StateLayout, seconds: float) -> None:
        self.agreement, self.layout, self._timeout_seconds = agreement, layout, seconds

    def reserve_folder(
        self, folder: Path, state: VersionedState, settle: Callable[[], None]
    ) -> PendingParts:
        """Make a folder for a checkpoint, and plan this worker's part. Collective.

        Args:
            folder: Folder of all checkpoints of the run.
            state: State that is saved.
            settle: Called on the first worker before it makes the folder.

        Raises:
            CheckpointError: The folder can't be made, or a worker doesn't see it. Raised on all
                workers.
        """
        agreement, rank, layout = self.agreement, self.agreement.group.rank, self.layout
        layout.equalize_copies()

        def make_folder() -> bytes:
            settle()
            try:
                return str(pending.reserve_folder(folder)).encode()
            except OSError as error:
                raise CheckpointError(
                    f"nothing can be saved in {folder}: {error}; check that it can be written"
                ) from error

        temporary_folder = Path(agreement.tell_everyone("run.save, a folder", make_folder).decode())
        objects = dict(zip(state.names, state.parts, strict=True))
        writer_ranks, own_layout, uncut_state = layout.writer_ranks(), None, Snapshot(0, None, {})

        def plan_own_part() -> int:
            nonlocal own_layout, uncut_state
            uncut_state, blocks = split_state(
                state.take_snapshot(copy=False),
                objects,
                layout.placements,
                layout.writes_part,
                layout.find_trained,
            )
            # A host that doesn't share the file system would write its part to a disk of its own.
            if rank in writer_ranks:
                if not temporary_folder.is_dir():
                    raise CheckpointError(
                        f"worker {rank} doesn't see {temporary_folder}, "
                        f"and has to write its part of the model there: {SHARED_FOLDER_HINT}"
                    )
                own_layout = lay_out_blocks(rank, blocks)
            return 0 if own_layout is None else own_layout.layout.nbytes

        # If one worker fails here, all of them raise its error, and the folder is removed.
        total_nbytes = sum(
            self._run_on_all("run.save, what is cut", plan_own_part, temporary_folder)
        )
        return PendingParts(
            temporary_folder,
            rank,
            uncut_state,
            own_layout,
            writer_ranks,
            total_nbytes,
            self._timeout_seconds,
        )

    def write_parts(self, parts: PendingParts) -> None:
        """Write this worker's part, and wait until all workers have written theirs. Collective."""

        def write_own_part() -> int:
            if parts.own_layout is not None:
                pending.write_part(parts.folder, parts.rank, parts.own_layout)
            return 0

        self._run_on_all("run.save, parts", write_own_part, parts.folder)

    def pack_places(self, loaded: Checkpoint) -> Snapshot:
        """Pack the tree and the index of a checkpoint, for `read_parts` on all workers."""
        places = {
            "version": loaded.snapshot.version,
            "tree": loaded.snapshot.tree,
            "index": index_to_json(loaded.index),
        }
        return Snapshot(0, json.dumps(places), {})

    def read_parts(self, path: Path, described: Snapshot, state: VersionedState) -> Snapshot:
        """Read this worker's part of the checkpoint in `path`.

        Collective: if one worker can't read its part, all raise `CheckpointError`.

        Args:
            path: The checkpoint.
            described: Result of `pack_places`, from the first worker.
            state: The models, optimizers and other objects to be loaded.
        """
        # The first worker has checked the tree and the index. The tensors come from the disk, which
        # every worker must see.
        places = json.loads(described.tree)
        objects, local_states = dict(zip(state.names, state.parts, strict=True)), list[Snapshot]()

        def read_own_part() -> int:
            if not path.is_dir():
                raise CheckpointError(
                    f"worker {self.agreement.group.rank} doesn't see {path}, and has to read its "
                    f"part there: {SHARED_FOLDER_HINT}"
                )
            with BlockReader(path, index_from_json(places["index"])) as reader:
                local_states.append(
                    read_local_state(
                        Snapshot(places["version"], places["tree"], {}),
                        reader,
                        objects,
                        self.layout.placements,
                    )
                )
            return 0

        self._run_on_all("run.resume, parts", read_own_part, None)
        return local_states[0]

    def _run_on_all(self, what: str, act: Callable[[], int], place: Path | None) -> list[int]:
        """Call `act` on all workers, and collect the results.

        If one worker raises `CheckpointError`, all raise that error, and `place` is removed.
        """
        try:
            return [
                int(body)
                for body in act_together(
                    self.agreement, what, lambda: b"%d" % act(), CheckpointError
                )
            ]
        except CheckpointError:
            if place is not None and self.agreement.group.rank == 0:
                with pending.remove_afterwards(place):
                    pass
            raise
