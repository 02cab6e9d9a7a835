"""Checkpoints on disk: written whole or not at all, checked by hash when read, the one before used
if the newest is broken.

    checkpoints/
      step-00000040/
        manifest.json          format, step, serial, metric, and the SHA-256 of each file below; its
                               last field is the hash of itself
        state.json             the tree of the snapshot, and notes on tensors that safetensors can't
                               keep as they are
        tensors.safetensors
        own-00001.json         what belongs to rank 1 alone (its random generators), and its tensors
        own-00001.safetensors
        blocks.json            of tensors that workers have cut: which file has which rectangle of
                               them
        blocks-00003.safetensors     what worker 3 has of those
        table-...              rows of sparse tables, in parts that are written and read one after
                               the other
      step-00000040.2/         step 40 once more, after a resume from an older one
      .saving-...              being written; left behind only by a process that was killed, removed
                               by the next save

Nothing is pickled. The newest is the one saved last (the highest serial), which after going back to
an older state is not the one of the highest step. The best is found by the metrics in the
manifests.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import safetensors.torch
from torch import Tensor

from paceline.checkpoint.files import catalogue, disk, manifest, pending
from paceline.checkpoint.files.block_files import INDEX, BlockReader, logical, uncut
from paceline.checkpoint.files.disk import WrittenFile, block
from paceline.checkpoint.files.file_layout import FileLayout, image
from paceline.checkpoint.files.manifest import (
    FORMAT,
    MANIFEST,
    NAME,
    UNCUT,
    Broken,
    Metric,
    state_files,
    step_of,
)
from paceline.checkpoint.files.pending import WrittenBlocks
from paceline.errors import CheckpointError, UsageError
from paceline.state.blocks import BlockIndex, from_json, merge, stored_bytes, to_json
from paceline.state.snapshot import UNREADABLE, Snapshot, lift

_SHOWN: Final = 200  # letters of an error that is not ours
_MARGIN: Final = 1 << 20  # bytes of a checkpoint that are not in tensors, roughly
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `load` has read: the state of all, and of single ranks.

    `index` says where the tensors lie that were cut (all of them, where it was loaded so), for
    `BlockReader(found.path, found.index)`.
    """

    path: Path
    step: int
    snapshot: Snapshot
    own: dict[int, Snapshot] = field(default_factory=dict)
    more: tuple[str, ...] = ()  # further states, which `part` reads
    index: BlockIndex = field(default_factory=dict)

    def part(self, name: str) -> Snapshot:
        """Read one of `more`, whose hashes have been checked.

        Raises `CheckpointError` if it can't be read.
        """
        try:
            return _state(self.path, name)
        except Broken as broken:
            raise CheckpointError(f"{self.path.name}: {broken}") from broken


def save(
    folder: Path,
    snapshot: Snapshot,
    step: int,
    *,
    own: Mapping[int, Snapshot] | None = None,
    keep: int = 3,
    metric: Metric | None = None,
) -> Path:
    """Write the checkpoint of `step` under `folder`, as `write` does, and return its path."""
    alone = {rank: image(state) for rank, state in (own or {}).items()}
    return write(folder, image(snapshot), step, own=alone, keep=keep, metric=metric)


def write(
    folder: Path,
    state: FileLayout,
    step: int,
    *,
    own: Mapping[int, FileLayout],
    keep: int,
    more: Iterable[tuple[str, FileLayout]] = (),
    target: Path | None = None,
    moved: Callable[[int], None] = lambda nbytes: None,
    at: Path | None = None,
    blocks: Callable[[Path], Iterable[WrittenBlocks]] | None = None,
    metric: Metric | None = None,
) -> Path:
    """Write the checkpoint of `step` under `folder`, and return its path.

    It is there in full or not at all, also after a loss of power. One process writes; two at once
    on one folder is a mistake. All checkpoints but the `keep` newest and the best one are removed.
    `target` is the path, if it was promised before. `metric` is the metric of this checkpoint.
    `more` is written piece by piece, and only one piece has to be in memory at a time. `moved` is
    called with the number of bytes as they are written. `at` is a folder that was reserved for it.
    `blocks` is called with that folder, and returns what all workers have written there of tensors
    that are cut.

    Raises `CheckpointError` if the disk is full or refuses: older checkpoints are untouched, and
    nothing half-written stays.
    """
    check(step, keep)
    images = {"": state} | {f"own-{rank:05d}": own[rank] for rank in sorted(own)}
    try:
        with pending.ending(at or pending.reserve(folder)) as temporary:
            target = target or catalogue.free(folder, step)
            serial = max((entry.serial or 0 for entry in catalogue.entries(folder)), default=0) + 1
            head = {"step": step, "serial": serial, "own": sorted(own)} | (
                {} if metric is None else {"metric": metric.fields()}
            )
            _write(temporary, itertools.chain(images.items(), more), head, moved, blocks)
            temporary.rename(target)
        disk.sync(folder)
    except OSError as error:
        raise _refusal(
            folder, error, step, sum(state.nbytes for state in images.values())
        ) from error
    try:
        catalogue.prune(folder, target, keep)
    except OSError as error:
        raise CheckpointError(
            f"step {step} is saved in {target}, but older ones could not be removed: {error}"
        ) from error
    return target


def check(step: int, keep: int) -> None:
    """Raise `UsageError` for a step or a `keep` that makes no sense."""
    if keep < 1 or step < 0:
        raise UsageError(
            f"a checkpoint needs keep >= 1 and step >= 0; found keep={keep}, step={step}"
        )


def load(
    folder: Path,
    *,
    say: Callable[[str], None],
    step: int | None = None,
    best: bool = False,
    lazy: bool = False,
    own: bool = True,
) -> Checkpoint:
    """Load the newest checkpoint in `folder` that is whole, or the one of `step`, or the `best`.

    Tensors that were cut are put together.

    With `lazy` the state of all has tensors without memory (on the device "meta"), and a
    `BlockReader` reads what is needed of them. Without `own` the states of single ranks are left
    out. Each checkpoint that is broken, or of another format, is named through `say`, with what is
    wrong with it. If none can be used, `load` raises CheckpointError.
    """
    paths = catalogue.newest(folder)
    if step is not None:
        known = sorted({step_of(path) for path in paths})
        paths = [path for path in paths if step_of(path) == step]
        if not paths:
            raise CheckpointError(
                f"no checkpoint of step {step} in {folder}; there are: "
                f"{', '.join(map(str, known)) or 'none'}"
            )
    if not paths:
        raise CheckpointError(
            f"no checkpoint in {folder}; save one first, or start without resuming"
        )
    if best:
        paths = [entry.path for entry in catalogue.best(folder)]
        if not paths:
            raise CheckpointError(
                f"no checkpoint in {folder} is the best: none was saved with a metric that is a "
                "number. run.save(metric=loss, best='min') "
                "does so; the newest is there without asking for the best"
            )
    reasons: list[str] = []
    for path in paths:
        try:
            checkpoint = _read(path, lazy=lazy, own=own)
        except Broken as broken:
            reasons.append(f"{path.name}: {broken}")
            continue
        if reasons:
            say(f"{'; '.join(reasons)}. Using {path.name}, which is whole")
        return checkpoint
    raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(reasons)}")


def read(path: Path, *, lazy: bool = False, own: bool = True) -> Checkpoint:
    """Load this one checkpoint, as `load` does. Raises `CheckpointError` if it can't be used."""
    if not NAME.fullmatch(path.name):
        raise CheckpointError(
            f"{path} is no checkpoint: those are called step-00000100 and the like"
        )
    try:
        return _read(path, lazy=lazy, own=own)
    except Broken as broken:
        raise CheckpointError(f"{path.name} can't be used: {broken}") from broken


# Writing
# --------------------------------------------------------------------------------------------------


def _write(
    folder: Path,
    images: Iterable[tuple[str, FileLayout]],
    head: dict[str, Any],
    moved: Callable[[int], None],
    blocks: Callable[[Path], Iterable[WrittenBlocks]] | None,
) -> None:
    files: dict[str, WrittenFile] = {}
    for name, state in images:
        tree, tensors = state_files(name)
        files[tree] = disk.write(folder / tree, [block(json.dumps(state.tree).encode())])
        files[tensors] = disk.write(folder / tensors, state.parts(), moved=moved)
    if blocks is not None:
        parts = list(blocks(folder))
        for part in parts:
            files.update(part.files)
        files[INDEX] = disk.write(
            folder / INDEX,
            [block(json.dumps(to_json(merge(part.index for part in parts))).encode())],
        )
    whole = {
        "format": UNCUT if blocks is None else FORMAT,
        **head,
        "files": {file: written._asdict() for file, written in files.items()},
    }
    disk.write(folder / MANIFEST, [block(manifest.sealed(whole))])
    disk.sync(folder)


def _refusal(folder: Path, error: OSError, step: int, nbytes: int) -> CheckpointError:
    kept = [path.name for path in catalogue.newest(folder)]
    there = (
        f"{', '.join(kept)} in {folder} {'is' if len(kept) == 1 else 'are'} untouched"
        if kept
        else f"there is none in {folder} yet"
    )
    free = _room(folder)
    if free < nbytes + _MARGIN or error.errno in _FULL:
        why = f"the disk is full: it takes {nbytes / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
        return CheckpointError(
            f"step {step} was not saved, {why}. Free some space or keep fewer checkpoints; {there}"
        )
    return CheckpointError(
        f"step {step} was not saved: {error}. Check that {folder} can be written; {there}"
    )


def _room(folder: Path) -> float:
    """Free bytes on the folder's disk; infinite if that can't be found out."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return math.inf


# Reading
# --------------------------------------------------------------------------------------------------


def _read(path: Path, *, lazy: bool, own: bool) -> Checkpoint:
    step, names, files = manifest.contents(path, manifest.read(path))
    for file, written in files.items():
        _check(path / file, written)
    cut = _index(path, files) if INDEX in files else {}
    index = {**_uncut(path), **cut} if lazy else cut
    try:
        with BlockReader(path, index) as reader:
            tensors = logical(index) if lazy else {name: reader.read(name) for name in cut}
    except CheckpointError as error:
        raise Broken(str(error)) from error
    shared = _state(path, "", tensors, lazy=lazy)
    snapshots = {rank: _state(path, name) for rank, name in names.items()} if own else {}
    states = (
        file.removesuffix(".json") for file in files if file.endswith(".json") and file != INDEX
    )
    more = tuple(sorted(name for name in states if name != "state" and name not in names.values()))
    return Checkpoint(path, step, shared, snapshots, more, index)


def _index(path: Path, files: Mapping[str, WrittenFile]) -> BlockIndex:
    """Read the places of cut tensors, which name only files that have been checked."""
    try:
        index = from_json(json.loads((path / INDEX).read_bytes()))
    except (ValueError, OSError, RecursionError, CheckpointError) as error:
        raise Broken(f"{INDEX} can't be used: {error}") from error
    odd = next(
        (
            stored.file
            for tensor in index.values()
            for stored in tensor.blocks
            if stored.file not in files
        ),
        None,
    )
    if odd is not None:
        raise Broken(f"{INDEX} names {odd!r}, which {MANIFEST} doesn't")
    for name, nbytes in stored_bytes(index).items():
        if nbytes > files[name].nbytes:
            raise Broken(f"{INDEX} names {nbytes} bytes of {name}, which has {files[name].nbytes}")
    return index


def _uncut(path: Path) -> BlockIndex:
    """Read where the tensors are that were not cut."""
    tree, tensors = state_files("")
    try:
        return uncut(path / tensors, json.loads((path / tree).read_bytes())["tensors"])
    except (*UNREADABLE, OSError, struct.error) as error:
        raise Broken(f"{tensors} can't be used: {error}") from error


def _state(
    path: Path, name: str, given: Mapping[str, Tensor] | None = None, *, lazy: bool = False
) -> Snapshot:
    """Read a state; `given` are tensors that lie elsewhere, or with `lazy` all of them."""
    tree, tensors = state_files(name)
    reading = tree
    try:
        head = json.loads((path / tree).read_bytes())
        reading = tensors
        kept = {} if lazy else safetensors.torch.load_file(path / tensors)
        reading = tree
        snapshot = Snapshot(
            head["version"],
            head["tree"],
            {**lift(kept, {} if lazy else head["tensors"]), **(given or {})},
        )
        snapshot.check()
    except (*UNREADABLE, OSError, safetensors.SafetensorError, CheckpointError) as error:
        # its hash is right, so it is what was written
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"
        raise Broken(
            f"{reading} can't be used: another version of paceline, or of torch, "
            f"has written it ({what})"
        ) from error
    return snapshot


def _check(path: Path, written: WrittenFile) -> None:
    try:
        nbytes = path.lstat().st_size
        if nbytes != written.nbytes:
            raise Broken(f"{path.name} has {nbytes} bytes instead of {written.nbytes}")
        if disk.sha256(path) != written.sha256:
            raise Broken(
                f"{path.name} is damaged: its content doesn't have the hash it was written with"
            )
    except OSError as error:
        raise Broken(f"{path.name} can't be read ({error.strerror})") from error
