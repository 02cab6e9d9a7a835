"""`help` of everything public says what it does in a line, and then shows an example."""

from __future__ import annotations

import ast
import builtins
import doctest
import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline import lab

MODULES = {"pl": pl, "lab": lab, "torch": torch, "F": F, "nn": nn}
# what a script has when it comes to an example
GIVEN = {"model", "optimizer", "loader", "x", "y", "loss", "epoch", "run", "cluster"}
RETURNED = {"pl.Run", "lab.Outcome"}  # by what their examples call
OBJECTS = {"run": pl.Run, "cluster": lab.Cluster}


def homes() -> dict[str, Any]:
    """Everything that users call. Errors are raised by us."""
    found = {f"pl.{name}": getattr(pl, name) for name in pl.__all__} | {
        f"lab.{name}": getattr(lab, name) for name in lab.__all__
    }
    found |= {
        f"run.{name}": each
        for name, each in vars(pl.Run).items()
        if not name.startswith("_") and not isinstance(each, property)
    }
    return {
        name: each
        for name, each in found.items()
        if callable(each) and not (isinstance(each, type) and issubclass(each, Exception))
    }


def example(home: object) -> str:
    """The source of the example that follows the first line; empty if there is none."""
    parts = (inspect.getdoc(home) or "").split("\n\n")
    if len(parts) < 2 or "\n" in parts[0] or not parts[1].startswith(">>> "):
        return ""
    return "".join(each.source for each in doctest.DocTestParser().get_examples(parts[1]))


def strangers(tree: ast.Module) -> Iterator[str]:
    """The names, attributes and options in an example that don't exist."""
    made = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    made |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)} | {
        node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and not hasattr(builtins, node.id)
            and node.id not in made | GIVEN | set(MODULES)
        ):
            yield node.id
        if (
            isinstance(node, ast.Attribute)
            and resolved(node) is None
            and isinstance(node.value, ast.Name)
            and node.value.id in KNOWN
        ):
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and (called := resolved(node.func)) is not None:
            yield from unfit(node, called)


KNOWN = {*MODULES, *OBJECTS}


def resolved(node: ast.expr) -> Any:
    """What a name with dots means, as far as it is known: of a module, of a run, of a cluster of
    the lab.
    """
    if isinstance(node, ast.Name):
        return MODULES.get(node.id, OBJECTS.get(node.id))
    return (
        getattr(resolved(node.value), node.attr, None)
        if isinstance(node, ast.Attribute) and resolved(node.value) is not None
        else None
    )


def unfit(node: ast.Call, called: Callable[..., Any]) -> Iterator[str]:
    """What of a call doesn't fit the signature of what is called."""
    try:
        taken = inspect.signature(called)
    except (TypeError, ValueError):  # of a builtin
        return
    method = ast.unparse(node.func).partition(".")[0] in OBJECTS
    try:
        taken.bind(
            *[None] * (len(node.args) + method),
            **{keyword.arg: None for keyword in node.keywords if keyword.arg},
        )
    except TypeError as error:
        yield f"{ast.unparse(node)}: {error}"


def built(tree: ast.Module) -> list[Any]:
    """The strategies, codecs and cuts that an example writes, made."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(resolved(node.func), type)
    ]
    plain = [
        node
        for node in calls
        if ast.unparse(node.func).startswith(("pl.", "lab."))
        and not ast.unparse(node.func).endswith("Cluster")
    ]
    return [eval(ast.unparse(node), dict(MODULES)) for node in plain]


@pytest.mark.parametrize("name", homes())
def test_help_begins_with_an_example(name: str) -> None:
    home = homes()[name]
    source = example(home)
    assert source, (
        f"{name}: one line that says what it does, an empty one, and an example with >>> are to "
        "begin its docstring"
    )
    tree = ast.parse(source)
    assert list(strangers(tree)) == []
    assert name in RETURNED or name.rpartition(".")[2] in source, "the example is of something else"
    assert all(each is not None for each in built(tree))


def test_what_everybody_begins_with_is_there() -> None:
    assert {
        "pl.start",
        "pl.launch",
        "pl.probe",
        "pl.load",
        "pl.tensor",
        "pl.shard",
        "pl.pipeline",
        "pl.AllReduce",
        "pl.topk",
        "run.prepare",
    } <= set(homes())


def test_what_is_wrong_is_found() -> None:
    wrong = ast.parse(
        "with pl.start(synk=1) as "
        "run:\n    run.prepair(model)\n    run.mean()\n    pl.begin(thing)\n"
    )
    assert {each.partition(":")[0] for each in strangers(wrong)} == {
        "pl.start(synk=1)",
        "run.prepair",
        "run.mean()",
        "pl.begin",
        "thing",
    }
    assert example(json.loads) == ""
