"""Sources as trees, for the tests that read code: each is parsed and walked through once in a
process, which such tests share.
"""

from __future__ import annotations

import ast
import gc
import io
import tokenize
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
    """Parse a source, without garbage collection: all sources make two million objects, and with
    it take half as long again.
    """
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


NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


@cache
def code_lines(source: str) -> frozenset[int]:
    """Numbers of the lines of a source that hold code: no blank lines, no comments, no
    docstrings.
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {
        line
        for token in tokens
        if token.type not in NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in parsed(source).nodes:
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node):
            code -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return frozenset(code)


def count_code_lines(
    source: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> int:
    """Number of lines of code of a class or a function of this source."""
    return sum(node.lineno <= line <= (node.end_lineno or 0) for line in code_lines(source))
