"""Real text that every machine has: the sources of the standard library, as bytes.

The files are split into train and validation files.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import DataError

# Folders of tests, and folders that some machines don't have.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "config",
}
VALIDATION_INTERVAL = 10  # one file in this number is for validation


def list_sources(folder: Path | None = None) -> list[Path]:
    """List the .py files under a folder, in an order that is the same on all machines.

    `folder` is the standard library by default, without its tests.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    files = [
        path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts)
    ]
    if not files:
        raise DataError(f"no .py files under {root}: give a folder that has some (--text FOLDER)")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def split_files(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Split files into train and validation files.

    The name of a file alone decides, so no text is ever in both.
    """
    validation = [
        path
        for path in files
        if hashlib.sha256(path.name.encode()).digest()[0] % VALIDATION_INTERVAL == 0
    ]
    validation_set = set(validation)
    return [path for path in files if path not in validation_set], validation


def read_tokens(files: list[Path], *, limit: int | None = None) -> Tensor:
    """Read the bytes of files, one after the other, as uint8 tokens.

    `limit` is the largest number of tokens.
    """
    text = bytearray()
    for path in files:
        text += path.read_bytes() + b"\n"
        if limit is not None and len(text) >= limit:
            break
    return (
        torch.frombuffer(text[:limit], dtype=torch.uint8)
        if text[:limit]
        else torch.empty(0, dtype=torch.uint8)
    )


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of tokens, side by side.

    Item i is (x, y), both int64 of `context` elements. y are the tokens that follow those of x.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        if tokens.numel() <= context:
            raise DataError(
                f"{tokens.numel()} tokens are too few for windows of {context}: give more text "
                "(one file in ten is for validation) or a shorter context"
            )
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (self.tokens.numel() - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        # One token more than the context, for the last target.
        window = self.tokens[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def make_datasets(
    context: int, *, folder: Path | None = None, limit: int | None = None
) -> tuple[Windows, Windows]:
    """Make windows for training and for validation.

    Args:
        context: Number of tokens in a window.
        folder: Folder of .py files. Default: the standard library.
        limit: Largest number of bytes of each data set. Default: all.
    """
    train, validation = split_files(list_sources(folder))
    return Windows(read_tokens(train, limit=limit), context), Windows(
        read_tokens(validation, limit=limit), context
    )


def decode_tokens(tokens: Tensor) -> str:
    """Decode byte tokens as text."""
    return bytes(tokens.tolist()).decode(errors="replace")
