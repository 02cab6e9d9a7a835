"""Tests that load torch's compiler: it takes longer than most of them take, so one process of
pytest-xdist does it for all.
"""

from __future__ import annotations

import functools

import pytest

COMPILES = pytest.mark.xdist_group("compiler")


def compiles(item: pytest.Item) -> bool:
    """Whether a test loads the compiler."""
    return any(COMPILES.args == mark.args for mark in item.iter_markers(COMPILES.name))


@functools.cache
def load() -> None:
    """Load it and all that a first graph needs, before workers wait for each other: their
    deadlines aren't for that.
    """
    import torch  # not before its threads are counted

    layer = torch.nn.Linear(2, 2)
    torch.compile(layer, backend="aot_eager")(torch.ones(1, 2)).sum().backward()
    torch.compiler.reset()
