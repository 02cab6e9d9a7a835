"""Each option that commands share says what it is for, in a sentence or in words that need none."""

from __future__ import annotations

import typing

from typer.models import ArgumentInfo, OptionInfo

from paceline import options


def test_each_has_a_help_that_ends() -> None:
    found = {
        name: typing.get_args(value)
        for name, value in vars(options).items()
        if typing.get_origin(value) is typing.Annotated
    }
    assert {"Workers", "Join", "Sync", "Dtypes", "Watch", "ReportTo"} <= set(found)
    for name, (_, info) in found.items():
        assert isinstance(info, OptionInfo | ArgumentInfo), name
        assert info.help and info.help[0].isupper() and info.help.endswith("."), name
