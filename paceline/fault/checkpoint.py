"""Checkpoints on disk: written whole or not at all, checked by hash when read, the one before used if the newest is broken.

    checkpoints/
      step-00000040/
        manifest.json          format, step, serial, and the SHA-256 of each file below; its last field is the hash of itself
        state.json             the tree of the snapshot, and notes on tensors that safetensors can't keep as they are
        tensors.safetensors
        own-00001.json         what belongs to rank 1 alone (its random generators), and its tensors
        own-00001.safetensors
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
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import safetensors.torch
from torch import Tensor

from paceline.cluster.snapshot import Snapshot, lift, lower
from paceline.errors import CheckpointError, UsageError

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
_SAVING: Final = ".saving-"
_NAME: Final = re.compile(r"step-(\d{8,})(\.\d+)?")
_NEWER: Final = -1  # the serial of what a newer paceline wrote
_MARGIN: Final = 1 << 20  # bytes of a checkpoint that are not in tensors, roughly
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Checkpoint:
    """What `load` has found: the state of all, and of single ranks."""

    path: Path
    step: int
    snapshot: Snapshot
    own: dict[int, Snapshot] = field(default_factory=dict)


class _Broken(Exception):
    """Why one checkpoint can't be used; another one perhaps can."""


def save(folder: Path, snapshot: Snapshot, step: int, *, own: Mapping[int, Snapshot] | None = None, keep: int = 3) -> Path:
    """Write the checkpoint of `step` under `folder` and remove all but the `keep` newest; gives its path.

    It is there in full or not at all, also after a loss of power. A full disk, or one that refuses, raises CheckpointError: what was
    there before is untouched and nothing half-written stays. One process writes; two at once on one folder is a mistake.
    """
    if keep < 1 or step < 0:
        raise UsageError(f"a checkpoint needs keep >= 1 and step >= 0; found keep={keep}, step={step}")
    states = {"": snapshot} | {f"own-{rank:05d}": state for rank, state in sorted((own or {}).items())}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        target = _free(folder, step)
        serial = max((_serial(path) or 0 for path in _found(folder)), default=0) + 1
        with _temporary(folder) as temporary:
            _write(temporary, states, {"step": step, "serial": serial, "own": sorted(own or {})})
            temporary.rename(target)
        _sync(folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise _refusal(folder, error, step, sum(state.nbytes for state in states.values())) from error
    try:
        _prune(folder, target, keep)
    except OSError as error:
        raise CheckpointError(f"step {step} is saved in {target}, but older ones could not be removed: {error}") from error
    return target


def load(folder: Path, *, say: Callable[[str], None], step: int | None = None) -> Checkpoint:
    """The newest checkpoint in `folder` that is whole, or the one of `step`.

    Each that is broken is named through `say`, with what is wrong with it. None at all, only broken ones, or one written by a newer
    paceline raises CheckpointError.
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
            checkpoint = _read(path)
        except _Broken as broken:
            reasons.append(f"{path.name}: {broken}")
            continue
        if reasons:
            say(f"{'; '.join(reasons)}. Using {path.name}, which is whole")
        return checkpoint
    raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(reasons)}")


def newest(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the one saved last first; those whose manifest can't be read count as newer than all others."""
    found = [(serial in (None, _NEWER), serial or 0, path.name, path) for path in _found(folder) for serial in [_serial(path)]]
    return [path for *_, path in sorted(found, reverse=True)]


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def _found(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


# Writing ----------------------------------------------------------------------------------------------------------------------


def _write(folder: Path, states: Mapping[str, Snapshot], head: dict[str, Any]) -> None:
    files: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        plain, notes = lower(state.tensors)
        tree, tensors = _names(name)
        _dump(folder / tree, {"version": state.version, "tree": state.tree, "tensors": notes})
        safetensors.torch.save_file(plain, folder / tensors)
        _sync(folder / tensors)
        files |= {file: {"nbytes": (folder / file).stat().st_size, "sha256": _sha256(folder / file)} for file in (tree, tensors)}
    manifest = {"format": FORMAT, **head, "files": files}
    (folder / MANIFEST).write_bytes(_sealed(manifest))
    _sync(folder / MANIFEST)
    _sync(folder)


def _names(state: str) -> tuple[str, str]:
    """The two files of a state: of all ("") or of one rank."""
    return (f"{state}.json", f"{state}.safetensors") if state else ("state.json", "tensors.safetensors")


def _dump(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree), encoding="utf-8")
    _sync(path)


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The only bytes that this manifest is written as."""
    body = json.dumps(manifest, sort_keys=True)
    seal = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-1]}, "seal": "{seal}"}}\n'.encode()


def _free(folder: Path, step: int) -> Path:
    """A name for the checkpoint of `step` that nothing has: to replace one could lose it, if the process were killed in between."""
    name = f"step-{step:08d}"
    numbers = itertools.count(2)
    while (folder / name).exists():
        name = f"step-{step:08d}.{next(numbers)}"
    return folder / name


def _prune(folder: Path, latest: Path, keep: int) -> None:
    """Leave the `keep` newest; the unreadable count as the oldest, and what a newer paceline wrote is left alone."""
    others = [path for path in newest(folder) if path != latest and _serial(path) != _NEWER]
    ordered = sorted(others, key=lambda path: _serial(path) is None)  # stable: the newest first, then the unreadable
    for path in ordered[keep - 1 :]:
        away = Path(tempfile.mkdtemp(prefix=_SAVING, dir=folder))
        path.rename(away / "old")  # so that one half removed is never taken for one half written
        shutil.rmtree(away)


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    outer = Path(tempfile.mkdtemp(prefix=_SAVING, dir=folder))
    try:
        inner = outer / "new"
        inner.mkdir()  # with the permissions of any folder: those of mkdtemp are for its owner alone
        yield inner
    finally:
        shutil.rmtree(outer)


def _sweep(folder: Path) -> None:
    """Remove what a killed process has left."""
    for path in folder.glob(f"{_SAVING}*"):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refusal(folder: Path, error: OSError | safetensors.SafetensorError, step: int, nbytes: int) -> CheckpointError:
    kept = [path.name for path in newest(folder)]
    there = f"{', '.join(kept)} in {folder} {'is' if len(kept) == 1 else 'are'} untouched" if kept else f"there is none in {folder} yet"
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < nbytes + _MARGIN or (isinstance(error, OSError) and error.errno in _FULL):
        why = f"the disk is full: it takes {nbytes / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
        return CheckpointError(f"step {step} was not saved, {why}. Free some space or keep fewer checkpoints; {there}")
    return CheckpointError(f"step {step} was not saved: {error}. Check that {folder} can be written; {there}")


# Reading ----------------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> Checkpoint:
    manifest = _manifest(path)
    if manifest["step"] != _step(path):
        raise _Broken(f"it was saved as step {manifest['step']}, and its folder has been renamed")
    own = {rank: f"own-{rank:05d}" for rank in manifest["own"]}
    snapshots = {name: _state(path, manifest["files"], name) for name in ("", *own.values())}
    return Checkpoint(path, manifest["step"], snapshots[""], {rank: snapshots[name] for rank, name in own.items()})


def _manifest(path: Path) -> dict[str, Any]:
    try:
        data = (path / MANIFEST).read_bytes()
        manifest: Any = json.loads(data)
    except OSError as error:
        raise _Broken(f"{MANIFEST} can't be read ({error.strerror})") from error
    except ValueError as error:
        raise _Broken(f"{MANIFEST} is damaged or half-written") from error
    if isinstance(manifest, dict) and isinstance(manifest.get("format"), int) and manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{path} was written by a newer paceline (format {manifest['format']}; this one reads up to {FORMAT}): "
            f"install that one, or name an older step"
        )
    if not isinstance(manifest, dict) or manifest.pop("seal", None) is None or data != _sealed(manifest):
        raise _Broken(f"{MANIFEST} is damaged: it doesn't have the hash it was written with")
    return manifest


def _serial(path: Path) -> int | None:
    """The place of a checkpoint in the order of saving; None if its manifest can't be read, _NEWER if only a newer paceline can."""
    try:
        return int(_manifest(path)["serial"])
    except _Broken:
        return None
    except CheckpointError:
        return _NEWER


def _state(path: Path, files: Mapping[str, Mapping[str, Any]], name: str) -> Snapshot:
    tree, tensors = _names(name)
    for file in (tree, tensors):
        _check(path / file, files[file])
    head = json.loads((path / tree).read_bytes())
    return Snapshot(head["version"], head["tree"], lift(_tensors(path / tensors), head["tensors"]))


def _tensors(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(path)


def _check(path: Path, wanted: Mapping[str, Any]) -> None:
    try:
        nbytes = path.stat().st_size
        if nbytes != wanted["nbytes"]:
            raise _Broken(f"{path.name} has {nbytes} bytes instead of {wanted['nbytes']}")
        if _sha256(path) != wanted["sha256"]:
            raise _Broken(f"{path.name} is damaged: its content doesn't have the hash it was written with")
    except OSError as error:
        raise _Broken(f"{path.name} can't be read ({error.strerror})") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
