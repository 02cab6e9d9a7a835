"""Text to objects and back, and what is refused with which words."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import notation
from paceline.cluster import mesh, topology_file
from paceline.cluster.launcher.request import parse_meeting_point
from paceline.cluster.topology import HostRanks, Topology
from paceline.errors import NotationError, PacelineError, UsageError
from paceline.formatting import format_as_call, format_choices
from paceline.notation import check_notation, format_notation, parse_notation, verify_strategy
from paceline.observe.watch.address import WatchAddress
from paceline.record.trackers import catalogue


@dataclass(frozen=True)
class Outer:
    rate: float
    momentum: float = 0.9
    __repr__ = format_as_call


@dataclass(frozen=True)
class Local:
    every: int = 16
    outer: Any = None
    parts: tuple[Any, ...] = ()
    bound: float = math.inf
    inner: Outer = field(default_factory=lambda: Outer(0.1))
    __repr__ = format_as_call


@dataclass(frozen=True)
class Named:
    first: Any
    second: Any = field(default=None, kw_only=True)
    third: Any = field(kw_only=True)
    hidden: int = field(default=3, init=False)
    __repr__ = format_as_call


class Plain:
    def __init__(self, rate: float, *, via: str = "auto") -> None:
        self.rate, self.via, self.state = rate, via, object()

    __repr__ = format_as_call


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
        (
            "Local(parts=((Outer(1.0), 'local'), (Outer(2.0), 'host')))",
            Local(parts=((Outer(1.0), "local"), (Outer(2.0), "host"))),
        ),
        ("Local(outer=[None, True, 1e-3, ()])", Local(outer=[None, True, 1e-3, ()])),
        ("either(1, a=2)", ("either", (1,), {"a": 2})),
    ],
)
def test_parse(written: str, meant: object) -> None:
    assert parse_notation(written, WORDS) == meant


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
    assert repr(value) == format_notation(value, WORDS) == written
    assert parse_notation(written, WORDS) == value


WHOLE = st.integers(1 - (1 << 63), (1 << 63) - 1)
leaves = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Outer, st.floats(allow_nan=False), st.floats(allow_nan=False))
        | st.builds(Local, WHOLE, inner)
    ),
    max_leaves=8,
)


@given(values)
def test_what_is_written_is_read_back(value: object) -> None:
    assert parse_notation(format_as_call(value), WORDS) == value


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "Locl()",
            (
                "Locl is not a word of the notation; possible: Fraction, Local, Named, Outer, "
                "either, picky; did you mean Local?"
            ),
        ),
        ("local()", "did you mean Local?"),
        (
            "Local(evry=3)",
            (
                "no argument evry (in Local(evry=3)); possible: bound, every, inner, outer, parts; "
                "did you mean every?"
            ),
        ),
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
        parse_notation(written, WORDS)
    assert said in str(caught.value)


def test_errors_of_a_constructor_keep_their_type() -> None:
    with pytest.raises(UsageError, match="x is negative") as caught:
        parse_notation("picky(-1)", WORDS)
    assert not isinstance(caught.value, NotationError)


def test_a_plain_class_is_written_by_its_constructor() -> None:
    assert repr(Plain(0.5)) == "Plain(0.5)"
    assert repr(Plain(0.5, via="ring")) == "Plain(0.5, via='ring')"


def test_functions_have_no_notation() -> None:
    def decide() -> None: ...

    assert repr(Local(outer=decide)) == "Local(outer=<function decide: no notation>)"
    assert format_as_call(Outer) == "<class Outer: no notation>"
    with pytest.raises(NotationError, match="no notation"):
        format_notation(Local(outer=decide), WORDS)
    with pytest.raises(NotationError, match="can't be read"):
        parse_notation(repr(Local(outer=decide)), WORDS)


def test_words_may_name_their_module() -> None:
    assert str(parse_notation("Fraction(1, 3)", WORDS)) == "1/3"


def test_check_reads_without_making() -> None:
    check_notation(
        "Local(nonsense=Outer())", WORDS
    )  # arguments are checked when the object is made
    with pytest.raises(NotationError, match="Outr is not a word"):
        check_notation("Local(outer=Outr())", WORDS)


@pytest.mark.jobs
def test_check_needs_no_torch() -> None:
    code = (
        "import sys, paceline.notation as n; n.check_notation('AllReduce(codec=topk(0.1))'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MISTAKEN = [
    ("AllReduce(via='rign')", "did you mean ring?"),
    ("AllReduce(via=5)", "via is 5 in AllReduce(via=5), and has to be 'auto' or 'native' or"),
    (
        "AllReduce('ring', True)",
        "bucket_mb is True in AllReduce('ring', True), and has to be a number",
    ),
    ("AllReduce('ring', 1, exact(), 4)", "too many positional arguments"),
    (
        "AllReduce(codec=5)",
        "codec is 5 in AllReduce(codec=5), and has to be Codec or Coding or auto or 'auto'",
    ),
    (
        "AllReduce(codec=AllReduce())",
        "codec is AllReduce() in AllReduce(codec=AllReduce()), and has to be",
    ),
    ("AllReduce(codec=gathered(3))", "coding is 3 in gathered(3), and has to be Coding"),
    (
        "AllReduce(codec=where(smaller('x'), exact(), int8()))",
        "numel is 'x' in smaller('x'), and has to be a whole number",
    ),
    (
        "LocalSGD(every='often')",
        "every is 'often' in LocalSGD(every='often'), and has to be a whole number or adaptive",
    ),
    ("LocalSGD(0)", "every=0 is not a number of steps"),
    (
        "ParameterServer(servers=1.5)",
        "servers is 1.5 in ParameterServer(servers=1.5), and has to be a whole number or None",
    ),
    ("topk(0.1)", "topk(0.1) is not a strategy"),
    ("7", "7 is not a strategy"),
]


@pytest.mark.parametrize(("written", "said"), MISTAKEN)
def test_arguments_of_a_strategy_are_of_their_kind(written: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        verify_strategy(written)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.jobs
def test_a_proof_leaves_no_torch_here_and_has_the_same_words() -> None:
    """As in a launcher, which stays small."""
    code = """
import sys
from paceline.cluster import mesh, topology_file
from paceline.cluster.launcher.request import parse_meeting_point
from paceline.cluster.topology import HostRanks, Topology
from paceline.errors import NotationError, PacelineError, UsageError
from paceline.notation import verify_strategy

for number, text in enumerate(sys.argv[1:]):
    try:
        verify_strategy(text)
    except NotationError as error:
        print(f"{number} notation {error}")
    except UsageError as error:
        print(f"{number} usage {error}")
print("torch" in sys.modules)
"""
    words = (
        "AllReduce(codec=error_feedback(topk(0.01)))",
        "LocalSGD(0)",
        "AllReduce(via=5)",
        "Local(",
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, *words], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert [line.split()[:2] for line in answer[:-1]] == [
        ["1", "usage"],
        ["2", "notation"],
        ["3", "notation"],
    ]
    assert "every=0 is not a number of steps" in answer[0] and answer[-1] == "False"


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
        assert repr(parse_notation(written)) == written


def test_choices() -> None:
    assert format_choices("rnig", ["tree", "ring"]) == "possible: ring, tree; did you mean ring?"
    assert format_choices("zzz", ["tree"]) == "possible: tree"
    assert format_choices("x", []) == "there are none to choose from"


# Texts too long, too deep or too large
# --------------------------------------------------------------------------------------------------

COUNTS = (49, 300, 5000, 50_000)
READERS: dict[str, Callable[[str], object]] = {
    "sync": notation.parse_strategy,
    "cut": notation.parse_cuts,
    "shares": lambda text: notation.parse_shares(text, 2),
    "mesh": lambda text: mesh.lay_out_mesh(
        mesh.parse_mesh(text), Topology((HostRanks("a", (0, 1), "10.0.0.1"),))
    ),
    "join": parse_meeting_point,
    "watch": lambda text: WatchAddress.parse_address(text, "--watch"),
    "report-to": lambda text: catalogue.make_trackers(catalogue.parse_trackers(text)),
    "cluster.json": topology_file.parse_topology,
}


def hostile_texts() -> Iterator[str]:
    for count in COUNTS:
        for left, right in (
            "()",
            "[]",
            "{}",
            ("shard(", ")"),
            ("AllReduce(codec=", ")"),
            ("tensor({'a':", "})"),
            ('{"a":', "}"),
        ):
            yield from (left * count + right * count, left * count)
        for word in (
            "-",
            "not ",
            "lambda: ",
            "1+",
            "a.",
            ",",
            ":",
            "data=2,",
            "shard('a'),",
            "prometheus,",
            "9",
            "²",
            "a",
            "\n",
        ):
            yield from (word * count, word * count + "1")
        for call in ("Sequence({})", "AllReduce({})", "LocalSGD({})", "tensor({{{}}})"):
            yield from (
                call.format(", ".join([part] * count))
                for part in ("AllReduce()", "a=1", "'a': column()", "1")
            )
        digits = "9" * count
        for number in (
            "LocalSGD({})",
            "LocalSGD(-{})",
            "ParameterServer(staleness={})",
            "AllReduce(codec=topk({}))",
            "shard('a', zero={})",
        ):
            yield from (
                number.format(each)
                for each in (digits, f"0x{digits}", f"{digits}.0", "1e999", "inf")
            )
        yield from (
            before + digits
            for before in (
                "data=",
                "localhost:",
                "localhost:-",
                "prometheus:",
                "prometheus:x:",
                ":",
                "[::1]:",
            )
        )
    yield from (
        "\0",
        "\ud800",
        "",
        "\t(",
        "1j",
        "tensor({[]: column()})",
        "tensor({column(): column()})",
        "Sequence((1,),(2,))",
        "prometheus:²",
    )


@pytest.mark.parametrize("option", READERS)
def test_any_text_of_an_option_is_read_or_refused(option: str) -> None:
    refused = 0
    for written in hostile_texts():
        try:
            READERS[option](written)
        except PacelineError:
            refused += 1
    assert refused > len([*hostile_texts()]) / 3
