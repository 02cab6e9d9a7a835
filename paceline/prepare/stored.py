"""Reads weights from checkpoints of other runs, in parts, for `run.prepare(init="runs/NAME")`.

runs/NAME/checkpoints/step-00000100    cut in any way, by any number of workers    each worker reads
                                       the rectangles that it holds now
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from paceline.checkpoint.files.block_files import BlockReader
from paceline.checkpoint.files.checkpoint import Checkpoint
from paceline.checkpoint.files.export import get_model_tree, load_lazily
from paceline.checkpoint.files.manifest import MANIFEST_FILE
from paceline.errors import CheckpointError, UsageError
from paceline.parallel import weights
from paceline.parallel.placement import Rectangle
from paceline.parallel.weights import Weights
from paceline.state.snapshot import subtrees_by_key, tensor_path


@dataclass(frozen=True)
class StoredModel:
    """A model in a run's folder, or in one of its checkpoints.

    `part` and `best` select it as in `paceline.state_dict`.
    """

    folder: Path
    part: str | None = None
    best: bool = False


Source = weights.Source | StoredModel


@contextlib.contextmanager
def open_weights(source: Source, say: Callable[[str], None]) -> Iterator[Weights]:
    """Open weights from a file, a dict, or the newest complete checkpoint of a run.

    Args:
        source: The file, dict, run folder or stored model.
        say: Called with a line about each checkpoint that is skipped.

    Raises:
        UsageError: The weights can't be read.
    """
    if isinstance(source, str | Path) and Path(source).is_dir():
        source = StoredModel(Path(source))
    if not isinstance(source, StoredModel):
        with weights.open_weights(source) as stored_weights:
            yield stored_weights
        return
    with contextlib.ExitStack() as files:
        with _explain_unusable():
            stored = _read_checkpoint(
                load_lazily(source.folder, say, best=source.best), source.part, files
            )
        yield stored


def _read_checkpoint(
    checkpoint: Checkpoint, part: str | None, files: contextlib.ExitStack
) -> Weights:
    # The model's state must be a plain dict of tensors, as each one is read by name, in rectangles.
    nodes = subtrees_by_key(get_model_tree(checkpoint, part))
    paths = {str(name): tensor_path(node) for name, node in nodes.items()}
    no_tensor = next((name for name, path in paths.items() if path is None), None)
    if no_tensor is not None or not paths:
        what = "it is no dict of tensors" if no_tensor is None else f"{no_tensor} is no tensor"
        raise CheckpointError(
            f"{checkpoint.path.name} has no model that can be read in parts: {what}; "
            "load it with paceline.state_dict and load_state_dict"
        )
    reader = files.enter_context(BlockReader(checkpoint.path, checkpoint.index))
    shapes = {
        name: reader.get_stored_tensor(path).shape
        for name, path in paths.items()
        if path is not None
    }

    def read(name: str, box: Rectangle) -> Tensor:
        with _explain_unusable():
            return reader.read_rectangle(str(paths[name]), box)

    # The manifest has the hashes of all files, so its hash stands for the whole checkpoint.
    digest = hashlib.sha256((checkpoint.path / MANIFEST_FILE).read_bytes()).hexdigest()
    return Weights(os.path.relpath(checkpoint.path), shapes, read, digest)


@contextlib.contextmanager
def _explain_unusable() -> Iterator[None]:
    """Raise `UsageError` in place of `CheckpointError`.

    The script has chosen the first values of its model, so no other checkpoint may replace them.
    """
    try:
        yield
    except CheckpointError as error:
        raise UsageError(str(error)) from error
