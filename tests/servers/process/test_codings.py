"""Which coding a parameter travels in, and when: the same on both sides, and refused where a
server can't have it.
"""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from torch import Size

from paceline.codec.auto import auto
from paceline.codec.codec import (
    after,
    error_feedback,
    gathered,
    named,
    plain,
    scattered,
    smaller,
    where,
)
from paceline.codec.coding import compose, exact
from paceline.codec.dense import bfloat16, half, int4, int8, sign
from paceline.codec.powersgd import powersgd
from paceline.codec.sparse import randomk, topk
from paceline.errors import UsageError
from paceline.servers.process.codings import (
    CodingPhase,
    check_codec,
    get_phase,
    make_phases,
    pack_phases,
    unpack_phases,
)
from paceline.servers.worker.strategy import ParameterServer

LARGE, SMALL = Size((100, 100)), Size((9,))


@pytest.mark.parametrize(
    ("codec", "found"),
    [
        (None, ()),
        (exact(), ()),
        (plain(), ()),
        (where(smaller(10_000), int8(), exact()), ()),
        (error_feedback(after(3, exact())), ()),
        (int8(), (CodingPhase(0, int8()),)),
        (error_feedback(topk(0.1)), (CodingPhase(0, topk(0.1), True),)),
        (where(smaller(10_000), exact(), int8()), (CodingPhase(0, int8()),)),
        (where(named("*.bias"), exact(), int8()), (CodingPhase(0, int8()),)),
        (after(5, int8()), (CodingPhase(0, None), CodingPhase(5, int8()))),
        (after(0, int8()), (CodingPhase(0, int8()),)),
        (
            error_feedback(after(5, topk(0.1), before=half())),
            (CodingPhase(0, half(), True), CodingPhase(5, topk(0.1), True)),
        ),
        (
            after(5, error_feedback(topk(0.1)), before=exact()),
            (CodingPhase(0, None), CodingPhase(5, topk(0.1), True)),
        ),
        (
            after(5, after(9, int4(), before=int8()), before=half()),
            (CodingPhase(0, half()), CodingPhase(5, int8()), CodingPhase(9, int4())),
        ),
        (
            after(5, after(2, int4(), before=int8()), before=half()),
            (CodingPhase(0, half()), CodingPhase(5, int4())),
        ),
        (
            after(5, int4(), before=after(9, int8(), before=half())),
            (CodingPhase(0, half()), CodingPhase(5, int4())),
        ),
    ],
    ids=repr,
)
def test_of_a_codec(codec: Any, found: Any) -> None:
    assert make_phases(codec, "body.weight", LARGE) == found
    for turn in range(12):
        assert get_phase(found, turn) == next(
            (phase for phase in reversed(found) if phase.begins <= turn), CodingPhase(0, None)
        )


def test_by_name_and_size() -> None:
    codec = where(named("*.bias"), half(), where(smaller(10), int4(), error_feedback(int8())))
    assert make_phases(codec, "a.bias", LARGE)[0].coding == half()
    assert make_phases(codec, "a.weight", SMALL)[0].coding == int4() and make_phases(
        codec, "a.weight", LARGE
    ) == (CodingPhase(0, int8(), True),)


CODINGS = [
    *(
        half(),
        bfloat16(),
        int8(),
        int8(64, "stochastic"),
        int4(32),
        sign(),
        topk(0.01),
        topk(0.1, threshold="sampled"),
        randomk(0.3),
    ),
    *(compose(topk(0.2), int8()), compose(compose(topk(0.2), exact()), int4(8))),
]


@pytest.mark.parametrize("coding", CODINGS, ids=repr)
def test_what_is_written_is_read(coding: Any) -> None:
    found = (CodingPhase(0, None), CodingPhase(3, coding))
    assert unpack_phases(msgpack.unpackb(msgpack.packb(pack_phases(found)))) == found


@pytest.mark.parametrize(
    "found",
    [
        *(
            [[0, ["topk", {"fraction": 5.0}]]],
            [[0, ["topk", {}]]],
            [[0, ["print", {}]]],
            [[0, ["int8", {"block": -1}]]],
            [["x", None]],
        ),
        *(
            [[0, ["topk", {"fraction": "much"}]]],
            [[0, []]],
            [[0, 7]],
            [[0]],
            5,
            [[0, ["compose", {"outer": 1, "inner": 2}]]],
        ),
    ],
    ids=repr,
)
def test_what_is_no_coding(found: Any) -> None:
    with pytest.raises((LookupError, TypeError, ValueError, UsageError)):
        unpack_phases(found)


class Own:
    """A coding of the user's."""

    def __repr__(self) -> str:
        return "Own()"

    def layout(self, numel: int) -> Any:
        return ()


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (
            "auto",
            'codec="auto" measures steps of AllReduce; give ParameterServer a codec, such as int8',
        ),
        (auto(), 'codec="auto" measures steps of AllReduce'),
        ("int8", "a codec is wanted, such as int8"),
        (
            error_feedback(powersgd(4)),
            (
                r"servers take each worker's gradient by itself: "
                r"give ParameterServer error_feedback\(topk\(0.01\)\)"
            ),
        ),
        (where(smaller(5), powersgd(4), int8()), "sums thin matrices among workers"),
        (after(5, powersgd(4)), "sums thin matrices among workers"),
        (
            error_feedback(gathered(sign())),
            r"gathered\(sign\(\)\) says how workers sum among themselves.*: say sign\(\)",
        ),
        (scattered(int8()), r"say int8\(\)"),
        (
            Own(),
            (
                "is no coding of paceline, and a server decodes without your script: "
                "possible are bfloat16, compose"
            ),
        ),
    ],
    ids=repr,
)
def test_what_a_server_can_not_have(codec: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_codec(codec)
    with pytest.raises(UsageError, match=text):
        ParameterServer(codec=codec)
