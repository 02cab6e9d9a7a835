"""Objects are written as the calls that make them, and unknown names come with the nearest known
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from paceline.formatting import (
    format_as_call,
    format_bytes,
    format_choices,
    format_count,
    list_message_lines,
    suggest_nearest,
)


@dataclass(frozen=True)
class Engine:
    steps: int
    name: str = "plain"
    parts: list[int] = field(default_factory=list)
    __repr__ = format_as_call


def test_defaults_are_left_out_and_required_arguments_have_no_name() -> None:
    assert format_as_call(Engine(4)) == "Engine(4)"
    assert format_as_call(Engine(4, "fast")) == "Engine(4, name='fast')"
    assert format_as_call(Engine(4, parts=[1])) == "Engine(4, parts=[1])"


def test_an_equal_value_of_another_type_is_no_default() -> None:
    assert format_as_call(Engine(True, "plain")) == "Engine(True)"

    @dataclass(frozen=True)
    class Switch:
        on: bool = True
        __repr__ = format_as_call

    assert format_as_call(Switch(1)) == "Switch(on=1)"  # type: ignore[arg-type]


def test_what_is_inside_is_written_too() -> None:
    assert format_as_call((Engine(1),)) == "(Engine(1),)"
    assert format_as_call([Engine(1), 2]) == "[Engine(1), 2]"
    assert format_as_call(Engine(1, parts=[Engine(2)])) == "Engine(1, parts=[Engine(2)])"  # type: ignore[list-item]


def test_functions_and_classes_have_no_notation() -> None:
    assert format_as_call(Engine) == "<class Engine: no notation>"
    assert format_as_call(len) == "<function len: no notation>"


def test_the_nearest_name_is_named_whatever_its_case() -> None:
    assert format_choices("rnig", ["tree", "ring"]) == "possible: ring, tree; did you mean ring?"
    assert format_choices("RING", ["tree", "ring"]).endswith("did you mean ring?")
    assert format_choices("zzz", ["tree", "ring"]) == "possible: ring, tree"
    assert format_choices("ring", []) == "there are none to choose from"


def test_a_name_that_is_like_an_unknown_one_is_named() -> None:
    assert (
        suggest_nearest("haed.weight", iter(["tail.weight", "head.weight"]))
        == " (the nearest is head.weight)"
    )
    assert suggest_nearest("haed.weight", {"zzz": 1}) == suggest_nearest("haed.weight", []) == ""


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2000, "2,000 steps")])
def test_numbers_of_things(number: int, text: str) -> None:
    assert format_count(number, "step") == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(12, "12 bytes"), (999, "999 bytes"), (1e3, "1.0 KB"), (7.5e6, "7.5 MB"), (2e9, "2.0 GB")],
)
def test_numbers_of_bytes(number: float, text: str) -> None:
    assert format_bytes(number) == text


class Mute(Exception):
    """An error whose message can't be made, as of a script that has a fault in `__str__`."""

    def __str__(self) -> str:
        raise AttributeError


def test_messages_of_errors() -> None:
    noted = ValueError("one: 1\ntwo")
    noted.add_note("three")
    assert list_message_lines(noted) == ["one: 1", "two", "three"]
    assert list_message_lines(KeyError()) == list_message_lines(None) == [""]
    assert list_message_lines(Mute()) == ["<exception str() failed>"]
    with pytest.raises(SyntaxError, match="'return' outside function") as raised:
        compile("return", "script.py", "exec")
    assert list_message_lines(raised.value) == ["'return' outside function"]
