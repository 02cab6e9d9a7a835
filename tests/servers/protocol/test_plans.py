"""A plan comes as it was written, and what is none is refused."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.servers.process.shard import ShardPlan
from paceline.servers.protocol.plans import pack_plan, unpack_plan
from tests.harness.shard_plans import WAYS, plan


def test_a_plan_comes_as_it_was_written() -> None:
    found, again = plan(), unpack_plan(pack_plan(plan()))
    assert again == ShardPlan(found.pieces, found.unit_pieces, found.piece_owners, found.optimizers)
    assert unpack_plan(pack_plan(plan(ways=WAYS))).unit_phases == WAYS


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x90",
        b"\x93\x90\x90\x90",
        b"\x95\x91\x90\x90\x90\x90",
        b"\x95\x90\x90\x90\x90\x91\x90",
        b"\x95\x90\x91\x91\x00\x90\x90\x90",
    ],
)
def test_what_is_no_plan(text: bytes) -> None:
    with pytest.raises(UsageError, match="no plan of a server"):
        unpack_plan(text)
