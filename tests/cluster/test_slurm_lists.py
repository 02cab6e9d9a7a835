"""Tests the lists in variables of Slurm."""

from __future__ import annotations

import pytest

from paceline.cluster.slurm_lists import expand_nodelist, expand_task_counts
from paceline.errors import PlaceError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3-4],m2", ["n1", "n3", "n4", "m2"]),
        ("r[1-2]c[01-02].x,z", ["r1c01.x", "r1c02.x", "r2c01.x", "r2c02.x", "z"]),
        ("", []),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert list(expand_nodelist(text)) == names


def test_a_list_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(PlaceError, match=r"\[a-b\] in a Slurm node list can't be read"):
        list(expand_nodelist("n[a-b]"))


def test_task_counts() -> None:
    assert expand_task_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_task_counts("") == []
