"""Models out of checkpoints: a plain dict for `load_state_dict`, or one file of safetensors.

Files are checked by hash first. Only the model is read into memory.

runs/NAME/checkpoints/step-00000100  -- state_dict -->  {"weight": ..., "bias": ...}
                                     -- export ------>  out.safetensors

An export has one tensor in memory at a time.
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
from paceline.checkpoint.files.disk import block
from paceline.checkpoint.files.file_layout import NAMES, header
from paceline.checkpoint.files.manifest import MANIFEST
from paceline.errors import CheckpointError, UsageError
from paceline.formatting import choices
from paceline.state.snapshot import UNREADABLE, Json, decode, entries, raw

SUFFIX: Final = ".safetensors"
_MODEL: Final = re.compile(r"model\d*")
Say = Callable[[str], None]


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
    found = locate(Path(folder), lambda text: warnings.warn(text, stacklevel=3), best=best)
    tree = model_tree(found, part)
    with BlockReader(found.path, found.index) as reader, _readable(found):
        state: dict[str, Any] = decode(tree, LazyTensors(reader))
    return state


def export(
    folder: Path,
    out: Path,
    part: str | None = None,
    *,
    best: bool = False,
    force: bool = False,
    say: Say,
) -> Checkpoint:
    """Write a model from a checkpoint to one file of safetensors, and return the checkpoint.

    Arguments are those of `state_dict`.

    A file that is there is replaced with `force` only, and once the new one is whole. Tied weights
    are written under each of their names.
    """
    if out.suffix != SUFFIX:
        raise UsageError(
            f"{out} doesn't end in {SUFFIX}, the only format that is written; "
            "for others use torch.save(paceline.state_dict(...))"
        )
    if out.exists() and not force:
        raise UsageError(f"{out} is there already; choose another name, or replace it with --force")
    found = locate(folder, say, best=best)
    nodes = _entries(model_tree(found, part))
    with BlockReader(found.path, found.index) as reader:
        tensors = LazyTensors(reader)
        with _readable(found):
            forms = {name: decode(node, found.snapshot.tensors) for name, node in nodes.items()}
        if odd := [
            name
            for name, form in forms.items()
            if not isinstance(form, Tensor) or form.dtype not in NAMES
        ]:
            kind = (
                forms[odd[0]].dtype
                if isinstance(forms[odd[0]], Tensor)
                else type(forms[odd[0]]).__qualname__
            )
            raise CheckpointError(
                f"{odd[0]} is a {kind}, which {SUFFIX} can't keep; use paceline.state_dict, and "
                "save what it gives"
            )

        def parts() -> Iterator[Tensor]:
            yield block(header(forms, notes={"format": "pt"}))
            for name in forms:
                yield raw(decode(nodes[name], tensors))

        _replace(out, parts())
    return found


def locate(folder: Path, say: Say, *, best: bool = False) -> Checkpoint:
    """Find and check the checkpoint that a folder stands for.

    Its tensors have no memory, and states of single ranks are left out. Raises `CheckpointError` if
    no checkpoint can be used; the ones that are passed over are named through `say`.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}; give that of a run, such as runs/NAME, "
            "or of one of its checkpoints"
        )
    if (folder / MANIFEST).exists():
        if best:
            raise UsageError(
                f"{folder} is one checkpoint: give the folder of its run "
                "to get the best, or leave out best"
            )
        return checkpoint.read(folder, lazy=True, own=False)
    inner = folder / "checkpoints"
    return checkpoint.load(
        inner if inner.is_dir() else folder, say=say, best=best, lazy=True, own=False
    )


def model_tree(found: Checkpoint, asked: str | None) -> Json:
    """Tree of the only model, or of the requested part.

    Raises `UsageError` if there is none.
    """
    tree = found.snapshot.tree
    if not isinstance(tree, dict) or "$" in tree:
        raise CheckpointError(f"{found.path.name} is not what a run saves; use another one")
    models = [name for name in tree if _MODEL.fullmatch(name)]
    if asked is None and len(models) != 1:
        count = f"{len(models)} models" if models else "no model"
        raise UsageError(
            f"{found.path.name} has {count}: say which part is meant; {choices('', tree)}"
        )
    name = models[0] if asked is None else asked
    if name not in tree:
        raise UsageError(f"{found.path.name} has no part {name!r}; {choices(name, tree)}")
    return tree[name]


def _entries(tree: Json) -> dict[str, Json]:
    """Return the trees of the entries of a state dict, by name."""
    found = entries(tree)
    if not found:
        raise CheckpointError(
            "this part is no dict of tensors: use paceline.state_dict, which reads any state"
        )
    return {str(name): node for name, node in found.items()}


@contextlib.contextmanager
def _readable(found: Checkpoint) -> Iterator[None]:
    """Raise `CheckpointError` for what comes of a tree that is none: its hash is right, but
    anybody may have written it.
    """
    try:
        yield
    except UNREADABLE as error:
        raise CheckpointError(
            f"{found.path.name} is not what a run saves ({type(error).__name__}: {error}); "
            "use another one"
        ) from error


def _replace(out: Path, parts: Iterator[Tensor]) -> None:
    """Write a file under another name, and give it its own once the disk has all of it."""
    saving = out.with_name(f".{out.name}.saving-{os.getpid()}")
    try:
        try:
            disk.write(saving, parts)
            saving.replace(out)
            disk.sync(out.parent)
        finally:
            saving.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{out} can't be written: {error}") from error
