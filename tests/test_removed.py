"""Options that were taken out say what to do instead, in Python and in the notation of the
command line.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import paceline as pl
from paceline.notation import parse_notation


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"pull": "forward"}, "leave pull out"),
        ({"backup_workers": 1, "requeue": True}, "leave requeue out"),
    ],
)
def test_a_parameter_server_says_what_to_do_instead(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(pl.UsageError, match=advice):
        pl.ParameterServer(**options)
    text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    with pytest.raises(pl.UsageError, match=advice):
        parse_notation(f"ParameterServer({text})")


def test_prepare_says_what_to_do_instead() -> None:
    with pytest.raises(pl.UsageError, match="shard='mine'"):
        pl.Run.prepare(None, readers="host")  # type: ignore[call-overload]


@pytest.mark.parametrize("cut", [pl.pipeline, pl.layers])
def test_cuts_say_that_the_split_stays(cut: Any) -> None:
    with pytest.raises(pl.UsageError, match=r"again=.*start again"):
        cut(split="auto", again=True)


def test_the_signature_is_kept() -> None:
    assert "staleness" in inspect.signature(pl.ParameterServer).parameters
    assert pl.ParameterServer(staleness=2) == pl.ParameterServer(None, 2)
