"""Sources as trees, for the tests that read code: each is parsed and walked through once in a process, which such tests share."""

from __future__ import annotations

import ast
import gc
from functools import cache
from typing import NamedTuple

import pytest

GROUP = "sources"
TOGETHER = pytest.mark.xdist_group(GROUP)  # in one process of pytest-xdist


class Parsed(NamedTuple):
    """A source as a tree, and all nodes of it, those above before those below."""

    tree: ast.Module
    nodes: tuple[ast.AST, ...]


@cache
def parsed(source: str) -> Parsed:
    """Parse a source, without garbage collection: all sources make two million objects, and with it take half as long again."""
    looked = gc.isenabled()
    gc.disable()
    try:
        tree = ast.parse(source)
        return Parsed(tree, tuple(ast.walk(tree)))
    finally:
        if looked:
            gc.enable()


def reads(item: pytest.Item) -> bool:
    """Whether a test is one of those that read sources together."""
    return any(GROUP in mark.args for mark in item.iter_markers("xdist_group"))
