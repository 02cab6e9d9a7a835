"""Text to objects and back, and what is refused with which words."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import notation
from paceline.errors import NotationError, UsageError
from paceline.notation import check, parse, text
from paceline.wording import choices, spell


@dataclass(frozen=True)
class Outer:
    rate: float
    momentum: float = 0.9
    __repr__ = spell


@dataclass(frozen=True)
class Local:
    every: int = 16
    outer: Any = None
    parts: tuple[Any, ...] = ()
    bound: float = math.inf
    inner: Outer = field(default_factory=lambda: Outer(0.1))
    __repr__ = spell


@dataclass(frozen=True)
class Named:
    first: Any
    second: Any = field(default=None, kw_only=True)
    third: Any = field(kw_only=True)
    hidden: int = field(default=3, init=False)
    __repr__ = spell


class Plain:
    def __init__(self, rate: float, *, via: str = "auto") -> None:
        self.rate, self.via, self.state = rate, via, object()

    __repr__ = spell


def picky(x: int) -> int:
    if x < 0:
        raise UsageError("x is negative: give 0 or more")
    if x == 13:
        raise ValueError("not thirteen")
    return x


WORDS: dict[str, str | Callable[..., Any]] = {
    "Local": Local,
    "Outer": Outer,
    "Named": Named,
    "picky": picky,
    "Fraction": "fractions:Fraction",
    "either": lambda *args, **kwargs: ("either", args, kwargs),
}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Local()", Local()),
        (" Local ( every = 10_000 ) ", Local(every=10_000)),
        ("Local(4, Outer(0.7, momentum=0.5))", Local(4, Outer(0.7, 0.5))),
        ("Local(every=-1)", Local(every=-1)),
        ("Local(bound=-inf)", Local(bound=-math.inf)),
        ("Local(parts=((Outer(1.0), 'local'), (Outer(2.0), 'host')))", Local(parts=((Outer(1.0), "local"), (Outer(2.0), "host")))),
        ("Local(outer=[None, True, 1e-3, ()])", Local(outer=[None, True, 1e-3, ()])),
        ("either(1, a=2)", ("either", (1,), {"a": 2})),
    ],
)
def test_parse(written: str, meant: object) -> None:
    assert parse(written, WORDS) == meant


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Local(), "Local()"),
        (Outer(0.7), "Outer(0.7)"),
        (Outer(0.7, 0.5), "Outer(0.7, momentum=0.5)"),
        (Local(every=16.0), "Local(every=16.0)"),  # type: ignore[arg-type]
        (Local(inner=Outer(0.2)), "Local(inner=Outer(0.2))"),
        (Local(parts=(Outer(1.0),)), "Local(parts=(Outer(1.0),))"),
        (Local(outer=["a b", None]), "Local(outer=['a b', None])"),
        (Named(1, third=2), "Named(1, third=2)"),
        (Named(1, second=4, third=2), "Named(1, second=4, third=2)"),
    ],
)
def test_repr_is_the_notation(value: object, written: str) -> None:
    assert repr(value) == text(value, WORDS) == written
    assert parse(written, WORDS) == value


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Outer, st.floats(allow_nan=False), st.floats(allow_nan=False))
        | st.builds(Local, st.integers(), inner)
    ),
    max_leaves=8,
)


@given(values)
def test_what_is_written_is_read_back(value: object) -> None:
    assert parse(spell(value), WORDS) == value


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("Locl()", "Locl is not a word of the notation; possible: Fraction, Local, Named, Outer, either, picky; did you mean Local?"),
        ("local()", "did you mean Local?"),
        ("Local(evry=3)", "no argument evry (in Local(evry=3)); possible: bound, every, inner, outer, parts; did you mean every?"),
        ("Outer()", "missing a required argument: 'rate'"),
        ("Outer(1, 2, 3)", "doesn't fit Outer(rate, momentum): too many positional arguments"),
        ("Local", "Local stands alone in Local: write it as a call, Local(...)"),
        ("pl.Local()", "pl.Local has a module before it: leave it out and write Local(...)"),
        ("Local(every=2**8)", "2**8 in Local(every=2**8) is not part of the notation"),
        ("Local(every=lambda: 3)", "lambda: 3 in"),
        ("Local(outer={'a': 1})", "{'a': 1} in"),
        ("Local(outer=b'x')", "b'x' in"),
        ("Local(outer=1j)", "1j in"),
        ("Local(every=-True)", "-True in"),
        ("Local(*[1])", "* or **"),
        ("Local(**{})", "* or **"),
        ("__import__('os').system('true')", "is not part of the notation"),
        ("__import__('os')", "__import__ is not a word"),
        ("Local(every=__name__)", "__name__ is not a word"),
        ("Local(", "Local( can't be read: '(' was never closed. Write it as in Python"),
        ("", "can't be read"),
        ("Local(every=1, every=2)", "gives every twice: leave one out"),
        ("x = 3", "can't be read"),
        ("Local()\0", "can't be read"),
        ("(" * 5000, "can't be read"),
        ("picky(13)", "picky(13) can't be made: not thirteen"),
    ],
)
def test_refused(written: str, said: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse(written, WORDS)
    assert said in str(caught.value)


def test_errors_of_a_constructor_keep_their_type() -> None:
    with pytest.raises(UsageError, match="x is negative") as caught:
        parse("picky(-1)", WORDS)
    assert not isinstance(caught.value, NotationError)


def test_a_plain_class_is_written_by_its_constructor() -> None:
    assert repr(Plain(0.5)) == "Plain(0.5)"
    assert repr(Plain(0.5, via="ring")) == "Plain(0.5, via='ring')"


def test_functions_have_no_notation() -> None:
    def decide() -> None: ...

    assert repr(Local(outer=decide)) == "Local(outer=<function decide: no notation>)"
    assert spell(Outer) == "<class Outer: no notation>"
    with pytest.raises(NotationError, match="no notation"):
        text(Local(outer=decide), WORDS)
    with pytest.raises(NotationError, match="can't be read"):
        parse(repr(Local(outer=decide)), WORDS)


def test_words_may_name_their_module() -> None:
    assert str(parse("Fraction(1, 3)", WORDS)) == "1/3"


def test_check_reads_without_making() -> None:
    check("Local(nonsense=Outer())", WORDS)  # arguments are checked when the object is made
    with pytest.raises(NotationError, match="Outr is not a word"):
        check("Local(outer=Outr())", WORDS)


def test_check_needs_no_torch() -> None:
    code = "import sys, paceline.notation as n; n.check('AllReduce()'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_word_can_be_made() -> None:
    wanted = {
        "after": "5, int8()",
        "compose": "topk(0.1), half()",
        "error_feedback": "sign()",
        "gathered": "int4()",
        "LocalSGD": "16, outer=nesterov(momentum=0.8), codec=int8()",
        "Sequence": "(AllReduce(), 'local'), (LocalSGD(32), 'host')",
        "named": "'*.bias'",
        "powersgd": "4",
        "randomk": "0.1",
        "scattered": "bfloat16()",
        "smaller": "10",
        "topk": "0.1",
        "where": "smaller(10), exact(), int8()",
    }
    for word in notation.VOCABULARY:
        written = f"{word}({wanted.get(word, '')})"
        assert repr(parse(written)) == written


def test_choices() -> None:
    assert choices("rnig", ["tree", "ring"]) == "possible: ring, tree; did you mean ring?"
    assert choices("zzz", ["tree"]) == "possible: tree"
    assert choices("x", []) == "there are none to choose from"
