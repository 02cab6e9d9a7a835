"""Writes checkpoints to disk in full or not at all, and reads them after a check of all hashes.

If the newest checkpoint is broken, the one before it is used.

    checkpoints/
      step-00000040/
        manifest.json          format, step, serial, metric, and the SHA-256 of each file below; its
                               last field is the hash of itself
        state.json             the tree of the snapshot, and notes on tensors that safetensors can't
                               keep as they are
        tensors.safetensors
        own-00001.json         state of rank 1 alone (such as its random generators), and its
        own-00001.safetensors  tensors
        blocks.json            for tensors that are cut between workers: the file of each rectangle
        blocks-00003.safetensors     the rectangles of worker 3
        table-...              rows of sparse tables, in parts that are written and read one after
                               the other
      step-00000040.2/         step 40 once more, after a resume from an older one
      .saving-...              being written; left behind only by a process that was killed, removed
                               by the next save

Nothing is pickled. The newest checkpoint is the one with the highest serial. After a run went back
to an older state, it is not the one with the highest step. The best one is found by the metrics in
the manifests.
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
from paceline.checkpoint.files.block_files import (
    INDEX_FILE,
    BlockReader,
    make_meta_tensors,
    read_uncut_index,
)
from paceline.checkpoint.files.disk import WrittenFile, to_byte_tensor
from paceline.checkpoint.files.file_layout import FileLayout, lay_out_snapshot
from paceline.checkpoint.files.manifest import (
    FOLDER_NAME,
    MANIFEST_FILE,
    NEWEST_FORMAT,
    UNCUT_FORMAT,
    BrokenCheckpoint,
    Metric,
    get_state_files,
    parse_step,
)
from paceline.checkpoint.files.pending import WrittenBlocks
from paceline.errors import CheckpointError, UsageError
from paceline.state.blocks import (
    BlockIndex,
    count_stored_bytes,
    index_from_json,
    index_to_json,
    merge_indexes,
)
from paceline.state.snapshot import DECODING_ERRORS, Snapshot, restore_dtypes

_MAX_ERROR_LENGTH: Final = 200  # letters shown of an error that another library raised
_NON_TENSOR_BYTES: Final = 1 << 20  # bytes of a checkpoint outside of its tensors, roughly
_DISK_FULL_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read: the state shared by all workers, and those of single ranks.

    `index` has the places of tensors that were cut, or of all tensors after a lazy load. Read them
    with `BlockReader(checkpoint.path, checkpoint.index)`.
    """

    path: Path
    step: int
    snapshot: Snapshot
    worker_snapshots: dict[int, Snapshot] = field(default_factory=dict)
    extra_states: tuple[str, ...] = ()  # names of further states, for `read_state`
    index: BlockIndex = field(default_factory=dict)

    def read_state(self, name: str) -> Snapshot:
        """Read one of `extra_states`. Its hash has been checked.

        Raises `CheckpointError` if it can't be read.
        """
        try:
            return _read_snapshot(self.path, name)
        except BrokenCheckpoint as broken:
            raise CheckpointError(f"{self.path.name}: {broken}") from broken


def save_checkpoint(
    folder: Path,
    snapshot: Snapshot,
    step: int,
    *,
    own: Mapping[int, Snapshot] | None = None,
    keep: int = 3,
    metric: Metric | None = None,
) -> Path:
    """Write a checkpoint. Returns its path.

    Args:
        folder: Folder of all checkpoints of a run.
        snapshot: State that all workers share.
        step: Steps that the run has taken.
        own: State of each single rank. Default: none.
        keep: Number of newest checkpoints that stay. Default: 3.
        metric: Metric of this checkpoint. Default: none.
    """
    worker_layouts = {rank: lay_out_snapshot(state) for rank, state in (own or {}).items()}
    return write_checkpoint(
        folder, lay_out_snapshot(snapshot), step, own=worker_layouts, keep=keep, metric=metric
    )


def write_checkpoint(
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
    """Write a checkpoint from planned files. Returns its path.

    The checkpoint is there in full or not at all, even after a loss of power. Only one process may
    write to a folder at a time. All checkpoints but the `keep` newest and the best are removed.

    Args:
        folder: Folder of all checkpoints of a run.
        state: State that all workers share.
        step: Steps that the run has taken.
        own: State of each single rank.
        keep: Number of newest checkpoints that stay.
        more: Further states by name. They are made and written one after the other, so only one
            of them is in memory at a time. Default: none.
        target: Path of the checkpoint, if it was promised before. Default: an unused name.
        moved: Called with the number of bytes as they are written.
        at: A folder from `pending.reserve_folder`. Default: a new one.
        blocks: Called with that folder. Waits for all workers, and returns the blocks that they
            wrote there. Default: no tensor is cut.
        metric: Metric of this checkpoint. Default: none.

    Raises:
        CheckpointError: The disk is full or can't be written. Older checkpoints are untouched, and
            no half-written file stays.
    """
    check_save_options(step, keep)
    layouts = {"": state} | {f"own-{rank:05d}": own[rank] for rank in sorted(own)}
    try:
        with pending.remove_afterwards(at or pending.reserve_folder(folder)) as temporary_folder:
            target = target or catalogue.choose_free_path(folder, step)
            serial = (
                max((entry.serial or 0 for entry in catalogue.list_entries(folder)), default=0) + 1
            )
            manifest_fields = {"step": step, "serial": serial, "own": sorted(own)} | (
                {} if metric is None else {"metric": metric.to_fields()}
            )
            _write_files(
                temporary_folder,
                itertools.chain(layouts.items(), more),
                manifest_fields,
                moved,
                blocks,
            )
            # Until here the checkpoint is hidden. The rename makes it visible in one step.
            temporary_folder.rename(target)
        disk.sync_folder(folder)
    except OSError as error:
        raise _explain_write_error(
            folder, error, step, sum(state.nbytes for state in layouts.values())
        ) from error
    # Older checkpoints are removed only once the new one is safe on the disk.
    try:
        catalogue.prune_checkpoints(folder, target, keep)
    except OSError as error:
        raise CheckpointError(
            f"step {step} is saved in {target}, but older ones could not be removed: {error}"
        ) from error
    return target


def check_save_options(step: int, keep: int) -> None:
    """Raise `UsageError` for a negative step or a `keep` below one."""
    if keep < 1 or step < 0:
        raise UsageError(
            f"a checkpoint needs keep >= 1 and step >= 0; found keep={keep}, step={step}"
        )


def load_checkpoint(
    folder: Path,
    *,
    say: Callable[[str], None],
    step: int | None = None,
    best: bool = False,
    lazy: bool = False,
    own: bool = True,
) -> Checkpoint:
    """Load the newest checkpoint in `folder` that isn't broken.

    Tensors that were cut are put together.

    Args:
        folder: Folder of all checkpoints of a run.
        say: Called with a message about checkpoints that are broken or of another format.
        step: Load a checkpoint of this step. Default: of any step.
        best: Load the best checkpoint in place of the newest. Default: False.
        lazy: Give the shared state tensors without memory (on the device "meta"). A `BlockReader`
            then reads only the tensors that are needed. Default: False.
        own: Load the states of single ranks, too. Default: True.

    Raises:
        CheckpointError: No checkpoint can be used.
    """
    paths = catalogue.list_newest(folder)
    if step is not None:
        saved_steps = sorted({parse_step(path) for path in paths})
        paths = [path for path in paths if parse_step(path) == step]
        if not paths:
            raise CheckpointError(
                f"no checkpoint of step {step} in {folder}; there are: "
                f"{', '.join(map(str, saved_steps)) or 'none'}"
            )
    if not paths:
        raise CheckpointError(
            f"no checkpoint in {folder}; save one first, or start without resuming"
        )
    if best:
        paths = [entry.path for entry in catalogue.list_best(folder)]
        if not paths:
            raise CheckpointError(
                f"no checkpoint in {folder} is the best: none was saved with a metric that is a "
                "number. Save with run.save(metric=loss, best='min'), or use the newest one"
            )
    # A broken checkpoint is skipped, with a message, and the next one in the order is used.
    reasons: list[str] = []
    for path in paths:
        try:
            checkpoint = _read_verified(path, lazy=lazy, own=own)
        except BrokenCheckpoint as broken:
            reasons.append(f"{path.name}: {broken}")
            continue
        if reasons:
            say(f"{'; '.join(reasons)}. Using {path.name}, which is complete")
        return checkpoint
    raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(reasons)}")


def read_checkpoint(path: Path, *, lazy: bool = False, own: bool = True) -> Checkpoint:
    """Load one checkpoint by its path, as `load_checkpoint` does.

    Raises `CheckpointError` if it can't be used.
    """
    if not FOLDER_NAME.fullmatch(path.name):
        raise CheckpointError(
            f"{path} is no checkpoint; give a folder with a name such as step-00000100"
        )
    try:
        return _read_verified(path, lazy=lazy, own=own)
    except BrokenCheckpoint as broken:
        raise CheckpointError(f"{path.name} can't be used: {broken}") from broken


# Writing
# --------------------------------------------------------------------------------------------------


def _write_files(
    folder: Path,
    layouts: Iterable[tuple[str, FileLayout]],
    first_fields: dict[str, Any],
    moved: Callable[[int], None],
    blocks: Callable[[Path], Iterable[WrittenBlocks]] | None,
) -> None:
    """Write all files of a checkpoint into `folder`, and the manifest after all others."""
    files: dict[str, WrittenFile] = {}
    for name, state in layouts:
        tree, tensors = get_state_files(name)
        files[tree] = disk.write_file(
            folder / tree, [to_byte_tensor(json.dumps(state.tree).encode())]
        )
        files[tensors] = disk.write_file(folder / tensors, state.iterate_bytes(), moved=moved)
    if blocks is not None:
        # This waits for all workers. The index then has the rectangles of all of them.
        parts = list(blocks(folder))
        for part in parts:
            files.update(part.files)
        files[INDEX_FILE] = disk.write_file(
            folder / INDEX_FILE,
            [
                to_byte_tensor(
                    json.dumps(index_to_json(merge_indexes(part.index for part in parts))).encode()
                )
            ],
        )
    # The manifest is sealed and comes last, as it has the hash of each other file.
    manifest_fields = {
        "format": UNCUT_FORMAT if blocks is None else NEWEST_FORMAT,
        **first_fields,
        "files": {file: written._asdict() for file, written in files.items()},
    }
    disk.write_file(
        folder / MANIFEST_FILE, [to_byte_tensor(manifest.seal_manifest(manifest_fields))]
    )
    disk.sync_folder(folder)


def _explain_write_error(folder: Path, error: OSError, step: int, nbytes: int) -> CheckpointError:
    """Make the error for a checkpoint that couldn't be written: the reason, and older ones."""
    older_names = [path.name for path in catalogue.list_newest(folder)]
    older_text = (
        f"{', '.join(older_names)} in {folder} {'is' if len(older_names) == 1 else 'are'} untouched"
        if older_names
        else f"there is none in {folder} yet"
    )
    free = _get_free_bytes(folder)
    if free < nbytes + _NON_TENSOR_BYTES or error.errno in _DISK_FULL_ERRORS:
        reason = (
            f"the disk is full: it takes {nbytes / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
        )
        return CheckpointError(
            f"step {step} was not saved, {reason}. Free some space or keep fewer checkpoints; "
            f"{older_text}"
        )
    return CheckpointError(
        f"step {step} was not saved: {error}. Check that {folder} can be written; {older_text}"
    )


def _get_free_bytes(folder: Path) -> float:
    """Get the free bytes on the folder's disk, or infinity if they are unknown."""
    # The folder itself may not exist yet.
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return math.inf


# Reading
# --------------------------------------------------------------------------------------------------


def _read_verified(path: Path, *, lazy: bool, own: bool) -> Checkpoint:
    """Read one checkpoint. Raises `BrokenCheckpoint` if a file isn't the one that was written."""
    step, state_names, files = manifest.parse_contents(path, manifest.read_manifest(path))
    # All hashes are checked before any content is parsed.
    for file, written in files.items():
        _verify_file(path / file, written)
    # Places of cut tensors; a lazy load needs those of all tensors.
    cut_index = _read_block_index(path, files) if INDEX_FILE in files else {}
    index = {**_read_uncut_index(path), **cut_index} if lazy else cut_index
    try:
        with BlockReader(path, index) as reader:
            tensors = (
                make_meta_tensors(index)
                if lazy
                else {name: reader.read_rectangle(name) for name in cut_index}
            )
    except CheckpointError as error:
        raise BrokenCheckpoint(str(error)) from error
    shared = _read_snapshot(path, "", tensors, lazy=lazy)
    snapshots = (
        {rank: _read_snapshot(path, name) for rank, name in state_names.items()} if own else {}
    )
    # All other states are read on demand, by `Checkpoint.read_state`.
    states = (
        file.removesuffix(".json")
        for file in files
        if file.endswith(".json") and file != INDEX_FILE
    )
    extra_states = tuple(
        sorted(name for name in states if name != "state" and name not in state_names.values())
    )
    return Checkpoint(path, step, shared, snapshots, extra_states, index)


def _read_block_index(path: Path, files: Mapping[str, WrittenFile]) -> BlockIndex:
    """Read the places of cut tensors.

    Raises `BrokenCheckpoint` if the index names a file that wasn't checked, or more bytes than a
    file has.
    """
    try:
        index = index_from_json(json.loads((path / INDEX_FILE).read_bytes()))
    except (ValueError, OSError, RecursionError, CheckpointError) as error:
        raise BrokenCheckpoint(f"{INDEX_FILE} can't be used: {error}") from error
    unknown_file = next(
        (
            stored.file
            for tensor in index.values()
            for stored in tensor.blocks
            if stored.file not in files
        ),
        None,
    )
    if unknown_file is not None:
        raise BrokenCheckpoint(
            f"{INDEX_FILE} names {unknown_file!r}, which {MANIFEST_FILE} doesn't"
        )
    for name, nbytes in count_stored_bytes(index).items():
        if nbytes > files[name].nbytes:
            raise BrokenCheckpoint(
                f"{INDEX_FILE} names {nbytes} bytes of {name}, which has {files[name].nbytes}"
            )
    return index


def _read_uncut_index(path: Path) -> BlockIndex:
    """Read the places of tensors that were not cut."""
    tree, tensors = get_state_files("")
    try:
        return read_uncut_index(path / tensors, json.loads((path / tree).read_bytes())["tensors"])
    except (*DECODING_ERRORS, OSError, struct.error) as error:
        raise BrokenCheckpoint(f"{tensors} can't be used: {error}") from error


def _read_snapshot(
    path: Path, name: str, other_tensors: Mapping[str, Tensor] | None = None, *, lazy: bool = False
) -> Snapshot:
    """Read one state from its two files.

    `other_tensors` has tensors that are stored elsewhere. With `lazy` it has all tensors.
    """
    tree, tensors = get_state_files(name)
    # The file that is read at the moment, for an error.
    current_file = tree
    try:
        content = json.loads((path / tree).read_bytes())
        current_file = tensors
        stored_tensors = {} if lazy else safetensors.torch.load_file(path / tensors)
        current_file = tree
        snapshot = Snapshot(
            content["version"],
            content["tree"],
            {
                **restore_dtypes(stored_tensors, {} if lazy else content["tensors"]),
                **(other_tensors or {}),
            },
        )
        snapshot.check_readable()
    except (*DECODING_ERRORS, OSError, safetensors.SafetensorError, CheckpointError) as error:
        # The hash is right, so the file is not damaged. It was written in another form.
        error_text = f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_ERROR_LENGTH]}"
        raise BrokenCheckpoint(
            f"{current_file} can't be used: another version of paceline, or of torch, "
            f"has written it ({error_text})"
        ) from error
    return snapshot


def _verify_file(path: Path, written: WrittenFile) -> None:
    try:
        nbytes = path.lstat().st_size
        if nbytes != written.nbytes:
            raise BrokenCheckpoint(f"{path.name} has {nbytes} bytes instead of {written.nbytes}")
        if disk.compute_sha256(path) != written.sha256:
            raise BrokenCheckpoint(
                f"{path.name} is damaged: its content doesn't have the hash it was written with"
            )
    except OSError as error:
        raise BrokenCheckpoint(f"{path.name} can't be read ({error.strerror})") from error
