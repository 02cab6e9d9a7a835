"""What messages say of workers that are missing or elsewhere."""

from __future__ import annotations

import re

from paceline.comm.sightings import SKIPPED, Sightings

HEADS = [["run.mean", 5, "", b"", None], ["backward", 6, "the next batch", b"", None]]


def test_a_rank_that_was_never_seen_is_named_with_its_host() -> None:
    assert Sightings(("a", "b"), (0, 1)).describe_whereabouts((1,)) == "rank 1 on b, never seen"
    assert (
        Sightings((), ()).describe_whereabouts((1, 2)) == "rank 1, never seen; rank 2, never seen"
    )
    assert Sightings((), ()).describe_whereabouts(()) == "a rank that can't be named"


def test_where_a_rank_was_at_the_last_meeting_is_told() -> None:
    sightings = Sightings(("a", "b"), (0, 1))
    sightings.note_meeting(HEADS)
    assert re.fullmatch(
        r"rank 1 on b, last seen at backward of step 6, \d+\.\d s ago",
        sightings.describe_whereabouts((1,)),
    )
    assert re.match(
        r"step 7, backward: rank 0 waited \d+\.\d s in vain for rank 1 on b, ",
        sightings.describe_missing(0, "backward", 7, (1,)),
    )


def test_who_is_at_which_call() -> None:
    sides = (
        "rank 0 on a at run.mean of step 5 (x.py:1); "
        "rank 1 on b at backward (the next batch) of step 6"
    )
    found = Sightings(("a", "b"), (0, 1)).describe_apart(HEADS, [" (x.py:1)", ""])
    assert found == (
        f"workers have come apart: {sides}. Every worker has to make the same collective calls "
        "in the same order"
    )


def test_ranks_at_the_same_call_are_told_together_and_unequal_steps_as_the_reason() -> None:
    heads = [
        ["backward", 3, "", b"", [3, 1, 0]],
        ["backward", 3, "", b"", [3, 2, 0]],
        ["run.log", 3, "", b"", None],
    ]
    sightings = Sightings((), (0, 1, 2))
    unequal = "in step 2 optimizers have not stepped alike (rank 0 has made 1; rank 1 has made 2)"
    assert sightings.describe_unequal_steps(heads) == unequal
    assert sightings.describe_apart(heads, [""] * 3) == (
        "workers have come apart: ranks 0, 1 at backward of step 3; rank 2 at run.log of step 3. "
        f"I{unequal[1:]}. {SKIPPED}"
    )
    assert sightings.describe_unequal_steps(HEADS) == ""
