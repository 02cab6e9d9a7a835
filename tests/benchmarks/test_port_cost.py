"""The ports of pytorch/examples fit their scripts as far as patches tell, and are counted."""

from __future__ import annotations

import re

import pytest

from benchmarks import port_cost

HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@$")


def make_script(patch: str) -> str:
    """A script that has the removed lines of a patch at their places, and other lines elsewhere."""
    placed: dict[int, str] = {}
    line = 0
    for each in patch.splitlines()[2:]:
        if found := HUNK.match(each):
            line = int(found[1])
        elif each.startswith("-"):
            placed[line] = each[1:]
            line += 1
    return "".join(f"{placed.get(number, f'# {number}')}\n" for number in range(1, 400))


@pytest.mark.parametrize("peer", port_cost.PEERS)
@pytest.mark.parametrize("name", port_cost.SCRIPTS)
def test_a_patch_applies_and_all_of_its_lines_count(name: str, peer: str) -> None:
    patch = (port_cost.PORTS / f"{name}.{peer}.patch").read_text()
    script = make_script(patch)
    port = port_cost.apply_patch(script, name, peer)
    changes = [line for line in patch.splitlines()[2:] if line[:1] in "+-"]
    assert port.changed == len(changes) > 3
    added = [line[1:] for line in changes if line[0] == "+"]
    assert set(added) <= set(port.text.splitlines())


def test_there_is_no_patch_without_a_script() -> None:
    names = {f"{name}.{peer}.patch" for name in port_cost.SCRIPTS for peer in port_cost.PEERS}
    assert {path.name for path in port_cost.PORTS.glob("*.patch")} == names


def test_changes_are_added_and_removed_lines() -> None:
    assert port_cost.count_changes("a\nb\nc\n", "a\nB\nc\nd\n") == 3
    assert port_cost.count_changes("a\n", "a\n") == 0


def test_the_table_has_sums() -> None:
    table = port_cost.make_table(
        {"one": dict.fromkeys(port_cost.PEERS, 2), "two": dict.fromkeys(port_cost.PEERS, 3)}
    )
    assert table.splitlines()[2:] == [
        "| one | 2 | 2 | 2 |",
        "| two | 3 | 3 | 3 |",
        "| all | 5 | 5 | 5 |",
    ]
