"""The parts of a checkpoint that workers write themselves if models are cut, into one folder.

            reserve                 write                          the first worker
worker 0    a folder is made  -->   the rest, and its part   -->   waits for all parts, names the
                                                                   folder
worker 1                      -->   its part
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.cut_state import gather, split
from paceline.checkpoint.files import pending
from paceline.checkpoint.files.block_files import BlockReader, BlocksLayout, plan
from paceline.checkpoint.files.checkpoint import Checkpoint
from paceline.checkpoint.files.file_layout import CopyMemory
from paceline.checkpoint.files.pending import WrittenBlocks
from paceline.checkpoint.layout import StateLayout
from paceline.comm.agreement import Agreement, act_together
from paceline.errors import CheckpointError
from paceline.state.blocks import from_json, to_json
from paceline.state.snapshot import Snapshot
from paceline.state.versioned import Versioned

SHARED = "put runs on a file system that all hosts share, with pl.start(folder=...)"


@dataclass(frozen=True)
class HeldPart:
    """A worker's part that was copied, to be written while training goes on."""

    place: Path
    number: int
    layout: BlocksLayout

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.layout.layout.nbytes

    def leave(self, moved: Callable[[int], None] = lambda nbytes: None) -> None:
        """Write the part, and say so in the folder. Raises `CheckpointError`."""
        pending.leave(self.place, self.number, self.layout, moved)


@dataclass(frozen=True)
class PendingParts:
    """A checkpoint that has a folder, and no parts yet.

    `rest`: what isn't cut; `mine`: this worker's part; `total`: bytes of all.
    """

    place: Path
    number: int
    rest: Snapshot
    mine: BlocksLayout | None
    writers: list[int]
    total: int
    seconds: float

    def held(self, room: CopyMemory, number: int) -> HeldPart:
        """Copy this worker's part into `room`, at the place `number`."""
        assert self.mine is not None
        layout = self.mine.layout.hold(room, number)
        return HeldPart(
            self.place, self.number, BlocksLayout(self.mine.file, layout, self.mine.index)
        )

    def collect(
        self, place: Path, before: Callable[[], None] = lambda: None
    ) -> list[WrittenBlocks]:
        """Call `before`, wait for the parts of all workers, and return what is in them."""
        before()
        return pending.collect(place, self.writers, self.seconds)


class CutParts:
    """Writes and reads the parts of checkpoints.

    `seconds`: how long the first worker waits for the others.
    """

    def __init__(self, agreement: Agreement, layout: StateLayout, seconds: float) -> None:
        self.agreement, self.layout, self._seconds = agreement, layout, seconds

    def reserve(self, folder: Path, state: Versioned, settle: Callable[[], None]) -> PendingParts:
        """Make a folder for the checkpoint of `state` that all workers see; `settle` is called
        by the first worker before. Collective.
        """
        agreement, rank, layout = self.agreement, self.agreement.group.rank, self.layout
        layout.level()

        def make() -> bytes:
            settle()
            try:
                return str(pending.reserve(folder)).encode()
            except OSError as error:
                raise CheckpointError(f"nothing can be saved in {folder}: {error}") from error

        place = Path(agreement.tell_everyone("run.save, a folder", make).decode())
        parts = dict(zip(state.names, state.parts, strict=True))
        writers, mine, rest = layout.writers(), None, Snapshot(0, None, {})

        def look() -> int:
            nonlocal mine, rest
            rest, blocks = split(
                state.snapshot(copy=False), parts, layout.placements, layout.writes, layout.renewed
            )
            if rank in writers:
                if not place.is_dir():
                    raise CheckpointError(
                        f"worker {rank} doesn't see {place}, "
                        f"and its part of the model goes there: {SHARED}"
                    )
                mine = plan(rank, blocks)
            return 0 if mine is None else mine.layout.nbytes

        total = sum(self._all("run.save, what is cut", look, place))
        return PendingParts(place, rank, rest, mine, writers, total, self._seconds)

    def write(self, parts: PendingParts) -> None:
        """Write this worker's part, and wait for those of all others. Collective."""

        def act() -> int:
            if parts.mine is not None:
                pending.leave(parts.place, parts.number, parts.mine)
            return 0

        self._all("run.save, parts", act, parts.place)

    def describe(self, found: Checkpoint) -> Snapshot:
        """Put into words where everything is in a checkpoint, for `read` on all workers."""
        what = {
            "version": found.snapshot.version,
            "tree": found.snapshot.tree,
            "index": to_json(found.index),
        }
        return Snapshot(0, json.dumps(what), {})

    def read(self, path: Path, described: Snapshot, state: Versioned) -> Snapshot:
        """Read this worker's part of the checkpoint in `path`.

        Collective: if one can't, all raise `CheckpointError`.
        """
        what = json.loads(described.tree)
        parts, found = dict(zip(state.names, state.parts, strict=True)), list[Snapshot]()

        def act() -> int:
            if not path.is_dir():
                raise CheckpointError(
                    f"worker {self.agreement.group.rank} doesn't see {path}, and reads its part "
                    f"there: {SHARED}"
                )
            with BlockReader(path, from_json(what["index"])) as reader:
                found.append(
                    gather(
                        Snapshot(what["version"], what["tree"], {}),
                        reader,
                        parts,
                        self.layout.placements,
                    )
                )
            return 0

        self._all("run.resume, parts", act, None)
        return found[0]

    def _all(self, what: str, act: Callable[[], int], place: Path | None) -> list[int]:
        """Collect the results of `act` on all workers.

        If it raises `CheckpointError` on one, all raise that error, and `place` is removed.
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
                with pending.ending(place):
                    pass
            raise
