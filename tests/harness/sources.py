"""Sources as trees, for the tests that read code: each is parsed and walked through once in a process, which such tests share."""

from __future__ import annotations

import ast
from functools import cache
from typing import NamedTuple

import pytest

TOGETHER = pytest.mark.xdist_group("sources")  # in one process of pytest-xdist


class Parsed(NamedTuple):
    """A source as a tree, and all nodes of it, those above before those below."""

    tree: ast.Module
    nodes: tuple[ast.AST, ...]


@cache
def parsed(source: str) -> Parsed:
    tree = ast.parse(source)
    return Parsed(tree, tuple(ast.walk(tree)))
