"""Reads models from checkpoints, as a dict for `load_state_dict` or as one file of safetensors.

Files are checked by hash first. Only the model is read into memory.

runs/NAME/checkpoints/step-00000100  -- state_dict -->  {"weight": ..., "bias": ...}
                                     -- export ------>  out.safetensors

An export has only one tensor in memory at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from paceline.checkpoint.files import checkpoint, disk
from paceline.checkpoint.files.block_files import BlockReader, LazyTensors
from paceline.checkpoint.files.checkpoint import Checkpoint
from paceline.checkpoint.files.disk import to_byte_tensor
from paceline.checkpoint.files.file_layout import SAFETENSORS_DTYPES, write_header
from paceline.checkpoint.files.manifest import MANIFEST_FILE
from paceline.errors import CheckpointError, UsageError
from paceline.formatting import format_choices
from paceline.state.snapshot import (
    DECODING_ERRORS,
    Json,
    decode_tree,
    subtrees_by_key,
    view_cpu_bytes,
)

EXPORT_SUFFIX: Final = ".safetensors"
_MODEL_NAME: Final = re.compile(r"model\d*")
AnnounceMessage = Callable[[str], None]


def state_dict(
    folder: str | Path, part: str | None = None, *, best: bool = False
) -> dict[str, Any]:
    """Read a model from a checkpoint, as a dict for `model.load_state_dict`.

    >>> model.load_state_dict(pl.state_dict("runs/circle"))

    The run that wrote it may have cut the model in any way. This needs no run and no other workers.
    Nothing in a checkpoint is unpickled.

    Args:
        folder: Folder of a run (its newest complete checkpoint is read), its checkpoints, or one
            checkpoint.
        part: Which object to read if there are several: "model1", or a name given to `run.keep`.
        best: Whether to read the best checkpoint, if the run saved with `run.save(metric=...,
            best=...)`. Default: False, the newest one.

    Raises:
        CheckpointError: No checkpoint can be used.
        UsageError: The checkpoint has no such part; the error names its parts.
    """
    loaded = load_lazily(Path(folder), lambda text: warnings.warn(text, stacklevel=3), best=best)
    tree = get_model_tree(loaded, part)
    with BlockReader(loaded.path, loaded.index) as reader, _convert_parse_errors(loaded):
        state: dict[str, Any] = decode_tree(tree, LazyTensors(reader))
    return state


def export_model(
    folder: Path,
    out: Path,
    part: str | None = None,
    *,
    best: bool = False,
    force: bool = False,
    say: AnnounceMessage,
) -> Checkpoint:
    """Write a model from a checkpoint to one file of safetensors. Returns the checkpoint.

    Tied weights are written under each of their names.

    Args:
        folder: Folder of a run, its checkpoints, or one checkpoint.
        out: The new file. Its name ends in ".safetensors".
        part: Which object to write if there are several. See `state_dict`.
        best: Whether to read the best checkpoint. Default: False, the newest one.
        force: Whether to replace `out` if it exists. It is replaced once the new file is complete.
        say: Called with a message about checkpoints that are skipped.

    Raises:
        CheckpointError: No checkpoint can be used, or `out` can't be written.
        UsageError: An argument can't be used. The error says what to give.
    """
    if out.suffix != EXPORT_SUFFIX:
        raise UsageError(
            f"{out} doesn't end in {EXPORT_SUFFIX}, the only format that is written; "
            "for other formats use torch.save(paceline.state_dict(...))"
        )
    if out.exists() and not force:
        raise UsageError(f"{out} exists already; choose another name, or replace it with --force")
    loaded = load_lazily(folder, say, best=best)
    nodes = _split_state_dict(get_model_tree(loaded, part))
    with BlockReader(loaded.path, loaded.index) as reader:
        tensors = LazyTensors(reader)
        with _convert_parse_errors(loaded):
            shapes = {
                name: decode_tree(node, loaded.snapshot.tensors) for name, node in nodes.items()
            }
        # Check all names and dtypes before anything is written. The tensors are not read yet.
        if unsupported := [
            name
            for name, form in shapes.items()
            if not isinstance(form, Tensor) or form.dtype not in SAFETENSORS_DTYPES
        ]:
            kind = (
                shapes[unsupported[0]].dtype
                if isinstance(shapes[unsupported[0]], Tensor)
                else type(shapes[unsupported[0]]).__qualname__
            )
            raise CheckpointError(
                f"{unsupported[0]} is a {kind}, which {EXPORT_SUFFIX} can't store; "
                "save the result of paceline.state_dict"
            )

        # Each tensor is read, written and dropped before the next one.
        def parts() -> Iterator[Tensor]:
            yield to_byte_tensor(write_header(shapes, notes={"format": "pt"}))
            for name in shapes:
                yield view_cpu_bytes(decode_tree(nodes[name], tensors))

        _replace_file(out, parts())
    return loaded


def load_lazily(folder: Path, say: AnnounceMessage, *, best: bool = False) -> Checkpoint:
    """Load the checkpoint that a folder stands for, without its tensors.

    States of single ranks are left out.

    Args:
        folder: Folder of a run, its checkpoints, or one checkpoint.
        say: Called with a message about checkpoints that are skipped.
        best: Whether to take the best checkpoint, not the newest. Default: False.

    Raises:
        CheckpointError: No checkpoint can be used.
        UsageError: `folder` is one checkpoint, and `best` was requested.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}; give the folder of a run, such as runs/NAME, "
            "or of one of its checkpoints"
        )
    if (folder / MANIFEST_FILE).exists():
        if best:
            raise UsageError(
                f"{folder} is one checkpoint: give the folder of its run "
                "to get the best, or leave out best"
            )
        return checkpoint.read_checkpoint(folder, lazy=True, own=False)
    # The folder of a run has a folder of checkpoints; otherwise it is one itself.
    inner = folder / "checkpoints"
    return checkpoint.load_checkpoint(
        inner if inner.is_dir() else folder, say=say, best=best, lazy=True, own=False
    )


def get_model_tree(loaded: Checkpoint, requested: str | None) -> Json:
    """Get the tree of the requested part, or of the only model.

    Raises `UsageError` if there is no such part.
    """
    tree = loaded.snapshot.tree
    if not isinstance(tree, dict) or "$" in tree:
        raise CheckpointError(f"{loaded.path.name} is not what a run saves; use another one")
    models = [name for name in tree if _MODEL_NAME.fullmatch(name)]
    if requested is None and len(models) != 1:
        count = f"{len(models)} models" if models else "no model"
        raise UsageError(
            f"{loaded.path.name} has {count}: give the name of a part; {format_choices('', tree)}"
        )
    name = models[0] if requested is None else requested
    if name not in tree:
        raise UsageError(f"{loaded.path.name} has no part {name!r}; {format_choices(name, tree)}")
    return tree[name]


def _split_state_dict(tree: Json) -> dict[str, Json]:
    """Split the tree of a state dict into the trees of its entries, by name."""
    nodes = subtrees_by_key(tree)
    if not nodes:
        raise CheckpointError(
            "this part is no dict of tensors: use paceline.state_dict, which reads any state"
        )
    return {str(name): node for name, node in nodes.items()}


@contextlib.contextmanager
def _convert_parse_errors(loaded: Checkpoint) -> Iterator[None]:
    """Turn errors of parsing a tree into `CheckpointError`.

    A hash doesn't prove that paceline wrote a file. Any program can write files with valid hashes.
    """
    try:
        yield
    except DECODING_ERRORS as error:
        raise CheckpointError(
            f"{loaded.path.name} is not what a run saves ({type(error).__name__}: {error}); "
            "use another one"
        ) from error


def _replace_file(out: Path, parts: Iterator[Tensor]) -> None:
    """Write a file under a temporary name, and rename it once all of it is on the disk."""
    temporary = out.with_name(f".{out.name}.saving-{os.getpid()}")
    try:
        try:
            disk.write_file(temporary, parts)
            temporary.replace(out)
            disk.sync_folder(out.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{out} can't be written: {error}") from error
