"""Public docstrings can be read by themselves: none continues the one before it, or sends the reader to another."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.harness.sources import TOGETHER, parsed

pytestmark = TOGETHER
PACKAGE = Path(__file__).parent.parent / "paceline"
DANGLING = {  # first words that need a sentence before them
    *(
        "It",
        "Its",
        "He",
        "She",
        "They",
        "Their",
        "Them",
        "This",
        "That",
        "These",
        "Those",
        "Both",
        "Neither",
        "Who",
        "Whom",
        "Whose",
        "Whoever",
    ),
    *("And", "Or", "But", "Nor", "So", "Else", "Otherwise"),
}
LEFT: dict[str, int] = {}
VALUES = {  # first words of a function that names its value, or an event, in place of saying what it does
    *("A", "An", "The", "All", "Another", "Each", "Every", "My", "Nothing", "One", "Some"),
    *("As", "At", "After", "Before", "By", "For", "From", "In", "Of", "On", "To", "With"),
    *("How", "What", "When", "Where", "Which", "Why"),
    *("Bytes", "Length", "Number", "Rows", "Seconds", "Shares", "Steps", "Sums"),
}


def public(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """The docstrings of a module or a class and of all that is public in it, each with where it stands."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if text := ast.get_docstring(node):
            yield name, text
        for child in node.body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []:
            if not getattr(child, "name", "_").startswith("_"):
                yield from public(child, f"{name}:{child.name}")  # type: ignore[attr-defined]


def dangles(text: str) -> bool:
    return text.split(maxsplit=1)[0].rstrip(",.:;") in DANGLING or "See `" in text


def functions(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """The docstrings of the functions of a module, private and nested ones too, but not of properties."""
    for child in ast.iter_child_nodes(node):
        place = f"{name}:{child.name}" if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(child)):
            is_property = any("property" in ast.unparse(decorator) for decorator in child.decorator_list)
            yield from [] if is_property else [(place, text)]
        if not isinstance(child, ast.expr):  # in which there are none
            yield from functions(child, place)


def names_a_value(text: str) -> bool:
    first = text.lstrip("*").split(maxsplit=1)[0].rstrip(",.:;")
    return first in VALUES or first in DANGLING or not first[0].isalpha()


def found() -> list[str]:
    files = sorted(PACKAGE.rglob("*.py"))
    texts = [text for file in files for text in public(parsed(file.read_text()).tree, file.relative_to(PACKAGE).as_posix())]
    assert len(texts) > 1000  # else they were not found
    return [name for name, text in texts if dangles(text)]


def test_docstrings_stand_alone() -> None:
    names = found()
    assert Counter(name.partition("/")[0] for name in names) == LEFT, names


def test_what_dangles_is_found() -> None:
    assert dangles("It doesn't, either.")
    assert dangles("And when, for the timeline.")
    assert dangles("See `Group.empty`: ordinary memory.")
    assert not dangles("Discard residuals encoded since the last commit.")


def test_functions_say_what_they_do() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    texts = [text for file in files for text in functions(parsed(file.read_text()).tree, file.relative_to(PACKAGE).as_posix())]
    assert len(texts) > 1000  # else they were not found
    assert [name for name, text in texts if names_a_value(text)] == [], "begin with a verb, such as Return; or with Whether"


def test_what_names_a_value_is_found() -> None:
    assert names_a_value("The workers are others now.")
    assert names_a_value("What each server has done so far.")
    assert names_a_value("`offsets` of this job's ranks.")
    assert not names_a_value("Return what each server has done so far.")
    assert not names_a_value("Whether replicas may differ.")
