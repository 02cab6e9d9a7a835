"""Checkpoints on disk: written whole or not at all, checked by hash when read, the one before used if the newest is broken.

    checkpoints/
      step-00000040/
        manifest.json          format, step, serial, and the SHA-256 of each file below; its last field is the hash of itself
        state.json             the tree of the snapshot, and notes on tensors that safetensors can't keep as they are
        tensors.safetensors
        own-00001.json         what belongs to rank 1 alone (its random generators), and its tensors
        own-00001.safetensors
        blocks.json            of tensors that workers have cut: which file has which rectangle of them
        blocks-00003.safetensors     what worker 3 has of those
        table-...              rows of sparse tables, in parts that are written and read one after the other
      step-00000040.2/         step 40 once more, after a resume from an older one
      .saving-...              being written; left behind only by a process that was killed, removed by the next save

Nothing is pickled. The newest is the one saved last (the highest serial), which after going back to an older state is not the
one of the highest step.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import safetensors.torch
from torch import Tensor

from paceline.errors import CheckpointError, UsageError
from paceline.fault import disk, pending
from paceline.fault.block_files import INDEX, BlockReader, logical, uncut
from paceline.fault.disk import WrittenFile, block
from paceline.fault.file_layout import FileLayout, image
from paceline.fault.pending import WrittenBlocks
from paceline.state.blocks import BlockIndex, from_json, merge, stored_bytes, to_json
from paceline.state.snapshot import UNREADABLE, Snapshot, lift

FORMAT: Final = 2  # the newest that this paceline reads
_UNCUT: Final = 1  # what it writes where nothing is cut, so that older ones read it
MANIFEST: Final = "manifest.json"
_NAME: Final = re.compile(r"step-(\d{8,})(\.\d+)?")
_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MOST: Final = 16 << 20  # bytes of a manifest
_SHOWN: Final = 200  # letters of an error that is not ours
_MARGIN: Final = 1 << 20  # bytes of a checkpoint that are not in tensors, roughly
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `load` has read: the state of all, and of single ranks.

    `index` says where the tensors lie that were cut (all of them, where it was loaded so), for `BlockReader(found.path, found.index)`.
    """

    path: Path
    step: int
    snapshot: Snapshot
    own: dict[int, Snapshot] = field(default_factory=dict)
    more: tuple[str, ...] = ()  # further states, which `part` reads
    index: BlockIndex = field(default_factory=dict)

    def part(self, name: str) -> Snapshot:
        """Read one of `more`, whose hashes have been checked. Raises `CheckpointError` if it can't be read."""
        try:
            return _state(self.path, name)
        except _Broken as broken:
            raise CheckpointError(f"{self.path.name}: {broken}") from broken


class _Broken(Exception):
    """Why one checkpoint can't be used; another one perhaps can."""


class _Newer(_Broken):
    """A checkpoint of a newer paceline: it is left alone. `serial`: as `_serial` gives it."""

    def __init__(self, version: int, serial: Any) -> None:
        super().__init__(f"it is of a newer paceline (format {version}; this one reads up to {FORMAT}), which has to be there to use it")
        self.serial = serial if type(serial) is int else None


@dataclass(frozen=True)
class _CheckpointEntry:
    """A checkpoint in its folder. `serial`: its place in the order of saving, None if that can't be read."""

    path: Path
    serial: int | None
    newer: bool  # than this paceline

    @property
    def age(self) -> tuple[bool, int, str]:
        """The key to sort by: entries that can't be read count as newer than all others."""
        return self.serial is None, self.serial or 0, self.path.name


def save(folder: Path, snapshot: Snapshot, step: int, *, own: Mapping[int, Snapshot] | None = None, keep: int = 3) -> Path:
    """Write the checkpoint of `step` under `folder`, as `write` does, and remove all but the `keep` newest; return its path."""
    return write(folder, image(snapshot), step, own={rank: image(state) for rank, state in (own or {}).items()}, keep=keep)


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
) -> Path:
    """Write the checkpoint of `step` under `folder` (as `target`, if that was promised), remove all but the `keep` newest; return its path.

    It is there in full or not at all, also after a loss of power. A full disk, or one that refuses, raises CheckpointError: what was
    there before is untouched and nothing half-written stays. One process writes; two at once on one folder is a mistake. `more` is written
    piece by piece: only one of them has to be there at a time. `moved` is called with the number of bytes as they are written. It is
    written in `at`, if a folder was reserved for it. `blocks` is called with that folder, and returns what all workers have written
    there of tensors that are cut.
    """
    check(step, keep)
    images = {"": state} | {f"own-{rank:05d}": own[rank] for rank in sorted(own)}
    try:
        with pending.ending(at or pending.reserve(folder)) as temporary:
            target = target or free(folder, step)
            serial = max((entry.serial or 0 for entry in _found(folder)), default=0) + 1
            head = {"step": step, "serial": serial, "own": sorted(own)}
            _write(temporary, itertools.chain(images.items(), more), head, moved, blocks)
            temporary.rename(target)
        disk.sync(folder)
    except OSError as error:
        raise _refusal(folder, error, step, sum(state.nbytes for state in images.values())) from error
    try:
        _prune(folder, target, keep)
    except OSError as error:
        raise CheckpointError(f"step {step} is saved in {target}, but older ones could not be removed: {error}") from error
    return target


def check(step: int, keep: int) -> None:
    """Raise `UsageError` for a step or a `keep` that makes no sense."""
    if keep < 1 or step < 0:
        raise UsageError(f"a checkpoint needs keep >= 1 and step >= 0; found keep={keep}, step={step}")


def load(folder: Path, *, say: Callable[[str], None], step: int | None = None, lazy: bool = False, own: bool = True) -> Checkpoint:
    """Load the newest checkpoint in `folder` that is whole, or the one of `step`. Tensors that were cut are put together.

    With `lazy` the state of all has tensors without memory (on the device "meta"), and a `BlockReader` reads what is needed of them.
    Without `own` the states of single ranks are left out. Each checkpoint that is broken, or of another format, is named through `say`,
    with what is wrong with it. If none can be used, `load` raises CheckpointError.
    """
    paths = newest(folder)
    if step is not None:
        known = sorted({_step(path) for path in paths})
        paths = [path for path in paths if _step(path) == step]
        if not paths:
            raise CheckpointError(f"no checkpoint of step {step} in {folder}; there are: {', '.join(map(str, known)) or 'none'}")
    if not paths:
        raise CheckpointError(f"no checkpoint in {folder}; save one first, or start without resuming")
    reasons: list[str] = []
    for path in paths:
        try:
            checkpoint = _read(path, lazy=lazy, own=own)
        except _Broken as broken:
            reasons.append(f"{path.name}: {broken}")
            continue
        if reasons:
            say(f"{'; '.join(reasons)}. Using {path.name}, which is whole")
        return checkpoint
    raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(reasons)}")


def read(path: Path, *, lazy: bool = False, own: bool = True) -> Checkpoint:
    """Load this one checkpoint, as `load` does. Raises `CheckpointError` if it can't be used."""
    if not _NAME.fullmatch(path.name):
        raise CheckpointError(f"{path} is no checkpoint: those are called step-00000100 and the like")
    try:
        return _read(path, lazy=lazy, own=own)
    except _Broken as broken:
        raise CheckpointError(f"{path.name} can't be used: {broken}") from broken


def newest(folder: Path) -> list[Path]:
    """List the checkpoints in `folder`, the one saved last first; those whose manifest can't be read count as newer than all others."""
    return [entry.path for entry in sorted(_found(folder), key=lambda entry: entry.age, reverse=True)]


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def _found(folder: Path) -> list[_CheckpointEntry]:
    try:
        return [_entry(path) for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} can't be looked at ({error.strerror})") from error


def _entry(path: Path) -> _CheckpointEntry:
    try:
        serial = _manifest(path).get("serial")
        return _CheckpointEntry(path, serial if type(serial) is int else None, newer=False)
    except _Newer as newer:
        return _CheckpointEntry(path, newer.serial, newer=True)
    except _Broken:
        return _CheckpointEntry(path, None, newer=False)


# Writing ----------------------------------------------------------------------------------------------------------------------


def _write(
    folder: Path,
    images: Iterable[tuple[str, FileLayout]],
    head: dict[str, Any],
    moved: Callable[[int], None],
    blocks: Callable[[Path], Iterable[WrittenBlocks]] | None,
) -> None:
    files: dict[str, WrittenFile] = {}
    for name, state in images:
        tree, tensors = _names(name)
        files[tree] = disk.write(folder / tree, [block(json.dumps(state.tree).encode())])
        files[tensors] = disk.write(folder / tensors, state.parts(), moved=moved)
    if blocks is not None:
        parts = list(blocks(folder))
        for part in parts:
            files.update(part.files)
        files[INDEX] = disk.write(folder / INDEX, [block(json.dumps(to_json(merge(part.index for part in parts))).encode())])
    manifest = {
        "format": _UNCUT if blocks is None else FORMAT,
        **head,
        "files": {file: written._asdict() for file, written in files.items()},
    }
    disk.write(folder / MANIFEST, [block(_sealed(manifest))])
    disk.sync(folder)


def _names(state: str) -> tuple[str, str]:
    """Return the two files of a state: of all ("") or of one rank."""
    return (f"{state}.json", f"{state}.safetensors") if state else ("state.json", "tensors.safetensors")


def _sealed(manifest: dict[str, Any]) -> bytes:
    """Write a manifest as the only bytes that are valid for it."""
    body = json.dumps(manifest, sort_keys=True)
    seal = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-1]}, "seal": "{seal}"}}\n'.encode()


def free(folder: Path, step: int) -> Path:
    """Choose an unused name for the checkpoint of `step`: to replace one could lose it, if the process were killed in between."""
    name = f"step-{step:08d}"
    numbers = itertools.count(2)
    while os.path.lexists(folder / name):  # a link to nowhere is in the way, too
        name = f"step-{step:08d}.{next(numbers)}"
    return folder / name


def _prune(folder: Path, latest: Path, keep: int) -> None:
    """Leave the `keep` newest; the unreadable count as the oldest, and checkpoints of a newer paceline are left alone."""
    others = [entry for entry in _found(folder) if entry.path != latest and not entry.newer]
    for entry in sorted(others, key=lambda entry: (entry.serial or 0, entry.path.name), reverse=True)[keep - 1 :]:
        away = Path(tempfile.mkdtemp(prefix=pending.SAVING, dir=folder))
        entry.path.rename(away / "old")  # so that one half removed is never taken for one half written
        shutil.rmtree(away)


def _refusal(folder: Path, error: OSError, step: int, nbytes: int) -> CheckpointError:
    kept = [path.name for path in newest(folder)]
    there = f"{', '.join(kept)} in {folder} {'is' if len(kept) == 1 else 'are'} untouched" if kept else f"there is none in {folder} yet"
    free = _room(folder)
    if free < nbytes + _MARGIN or error.errno in _FULL:
        why = f"the disk is full: it takes {nbytes / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
        return CheckpointError(f"step {step} was not saved, {why}. Free some space or keep fewer checkpoints; {there}")
    return CheckpointError(f"step {step} was not saved: {error}. Check that {folder} can be written; {there}")


def _room(folder: Path) -> float:
    """Return the number of bytes that are free on the folder's disk; infinite where that can't be found out."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return math.inf


# Reading ----------------------------------------------------------------------------------------------------------------------


def _read(path: Path, *, lazy: bool, own: bool) -> Checkpoint:
    manifest = _manifest(path)
    step, names, files = _contents(path, manifest)
    for file, written in files.items():
        _check(path / file, written)
    cut = _index(path, files) if INDEX in files else {}
    index = {**_uncut(path), **cut} if lazy else cut
    try:
        with BlockReader(path, index) as reader:
            tensors = logical(index) if lazy else {name: reader.read(name) for name in cut}
    except CheckpointError as error:
        raise _Broken(str(error)) from error
    shared = _state(path, "", tensors, lazy=lazy)
    snapshots = {rank: _state(path, name) for rank, name in names.items()} if own else {}
    states = (file.removesuffix(".json") for file in files if file.endswith(".json") and file != INDEX)
    more = tuple(sorted(name for name in states if name != "state" and name not in names.values()))
    return Checkpoint(path, step, shared, snapshots, more, index)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        data = disk.read(path / MANIFEST, _MOST)
        manifest: Any = json.loads(data)
        version = manifest.get("format") if isinstance(manifest, dict) else None
        if type(version) is int and version > FORMAT:
            raise _Newer(version, manifest.get("serial"))
        if not isinstance(manifest, dict) or manifest.pop("seal", None) is None or data != _sealed(manifest):
            raise _Broken(f"{MANIFEST} is damaged: it doesn't have the hash it was written with")
    except OSError as error:
        raise _Broken(f"{MANIFEST} can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise _Broken(f"{MANIFEST} is damaged or half-written") from error
    if type(version) is not int or not _UNCUT <= version <= FORMAT:
        raise _Broken(f"{MANIFEST} is of format {version!r}, and this paceline reads {_UNCUT} to {FORMAT}")
    return manifest


def _contents(path: Path, manifest: Mapping[str, Any]) -> tuple[int, dict[int, str], dict[str, WrittenFile]]:
    """Read from a manifest the step, the states of single ranks, and the files. A name never leads out of the folder."""
    step, ranks, files = (manifest.get(name) for name in ("step", "own", "files"))
    if not isinstance(ranks, list) or any(type(rank) is not int or rank < 0 for rank in ranks) or not isinstance(files, dict):
        raise _Broken(f"{MANIFEST} lacks the step, the ranks or the files: another version of paceline has written it")
    if type(step) is not int or step != _step(path):
        raise _Broken(f"it was saved as step {step!r}, and its folder has been renamed")
    if odd := next((file for file in files if not _FILE.fullmatch(file)), None):
        raise _Broken(f"{MANIFEST} names {odd!r}, which is no name of a file in it")
    if odd := next((file for file, wanted in files.items() if not _written(wanted)), None):
        raise _Broken(f"{MANIFEST} doesn't say what {odd} has to be: another version of paceline has written it")
    own = {rank: f"own-{rank:05d}" for rank in ranks}
    absent = [file for state in ("", *own.values()) for file in _names(state) if file not in files]
    if absent:
        raise _Broken(f"{MANIFEST} doesn't name {', '.join(absent)}, which it has to have")
    return step, own, {file: WrittenFile(**wanted) for file, wanted in files.items()}


def _written(wanted: Any) -> bool:
    return isinstance(wanted, dict) and {field: type(value) for field, value in wanted.items()} == {"nbytes": int, "sha256": str}


def _index(path: Path, files: Mapping[str, WrittenFile]) -> BlockIndex:
    """Read where the tensors are that were cut; it names no file but those that have been checked."""
    try:
        index = from_json(json.loads((path / INDEX).read_bytes()))
    except (ValueError, OSError, CheckpointError) as error:
        raise _Broken(f"{INDEX} can't be used: {error}") from error
    odd = next((stored.file for tensor in index.values() for stored in tensor.blocks if stored.file not in files), None)
    if odd is not None:
        raise _Broken(f"{INDEX} names {odd!r}, which {MANIFEST} doesn't")
    for name, nbytes in stored_bytes(index).items():
        if nbytes > files[name].nbytes:
            raise _Broken(f"{INDEX} names {nbytes} bytes of {name}, which has {files[name].nbytes}")
    return index


def _uncut(path: Path) -> BlockIndex:
    """Read where the tensors are that were not cut."""
    tree, tensors = _names("")
    try:
        return uncut(path / tensors, json.loads((path / tree).read_bytes())["tensors"])
    except (*UNREADABLE, OSError, struct.error) as error:
        raise _Broken(f"{tensors} can't be used: {error}") from error


def _state(path: Path, name: str, given: Mapping[str, Tensor] | None = None, *, lazy: bool = False) -> Snapshot:
    """Read a state; `given` are tensors that lie elsewhere, or with `lazy` all of them."""
    tree, tensors = _names(name)
    reading = tree
    try:
        head = json.loads((path / tree).read_bytes())
        reading = tensors
        kept = {} if lazy else safetensors.torch.load_file(path / tensors)
        reading = tree
        snapshot = Snapshot(head["version"], head["tree"], {**lift(kept, {} if lazy else head["tensors"]), **(given or {})})
        snapshot.check()
    except (*UNREADABLE, OSError, safetensors.SafetensorError, CheckpointError) as error:
        # its hash is right, so it is what was written
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"
        raise _Broken(f"{reading} can't be used: another version of paceline, or of torch, has written it ({what})") from error
    return snapshot


def _check(path: Path, written: WrittenFile) -> None:
    try:
        nbytes = path.lstat().st_size
        if nbytes != written.nbytes:
            raise _Broken(f"{path.name} has {nbytes} bytes instead of {written.nbytes}")
        if disk.sha256(path) != written.sha256:
            raise _Broken(f"{path.name} is damaged: its content doesn't have the hash it was written with")
    except OSError as error:
        raise _Broken(f"{path.name} can't be read ({error.strerror})") from error
