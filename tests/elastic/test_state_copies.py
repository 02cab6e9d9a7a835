"""Who keeps whose copy, how often there are copies, and that only whole ones are used."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.elastic import state_copies
from paceline.elastic.state_copies import (
    CopyLabel,
    CopyStore,
    ReplicationTimes,
    assign_keepers,
    check_replicate,
    compute_cadence,
    find_heirs,
    pack_copy,
)
from paceline.errors import CheckpointError, UsageError


@pytest.mark.parametrize(
    ("hosts", "wanted"),
    [
        ({0: 0, 2: 1, 4: 2}, {0: 2, 2: 4, 4: 0}),  # the leaders of three hosts
        ({0: 0, 1: 1, 2: 0, 3: 1}, {0: 1, 2: 3, 1: 0, 3: 2}),  # all workers, dealt in turn
        ({0: 0, 1: 0, 2: 0, 3: 1}, {0: 3, 1: 3, 2: 3, 3: 0}),  # more than the next host has
        ({1: 5, 3: 5, 4: 5}, {1: 3, 3: 4, 4: 1}),  # one host
        ({3: 1}, {}),
        ({}, {}),
    ],
)
def test_the_next_host_keeps_what_a_host_has(hosts: dict[int, int], wanted: dict[int, int]) -> None:
    assert assign_keepers(hosts) == wanted


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_two_hosts_may_be_lost_that_are_no_buddies(count: int) -> None:
    hosts = {rank: rank // 2 for rank in range(2 * count)}
    found = assign_keepers(hosts)
    assert all(hosts[owner] != hosts[keeper] for owner, keeper in found.items())
    for one in range(count):
        for other in range(one + 1, count):
            lost = [
                owner
                for owner, keeper in found.items()
                if {hosts[owner], hosts[keeper]} == {one, other}
            ]
            assert bool(lost) == ((other - one) in (1, count - 1))


def test_the_newest_copy_counts_and_one_goes_on_with_it() -> None:
    held = [{7: 12, 8: 3}, {7: 13}, {7: 13, 8: 4}, {}]
    assert find_heirs(held, [7, 8, 9]) == {7: 1, 8: 2, 9: None}


def test_copies_are_made_as_often_as_the_budget_allows() -> None:
    assert compute_cadence([ReplicationTimes(0.001, 0.004, 0.1)]) == 1
    # the slowest counts
    assert (
        compute_cadence([ReplicationTimes(0.01, 0.04, 0.1), ReplicationTimes(0.02, 0.06, 0.1)]) == 8
    )
    assert compute_cadence([ReplicationTimes(0.01, 0.04, 0.1)], budget=0.5) == 1
    assert compute_cadence([ReplicationTimes(0.0, 3.0, 0.2)]) == 150
    for spent in (0.003, 0.07, 0.9):
        every = compute_cadence([ReplicationTimes(spent / 3, spent * 2 / 3, 0.2)])
        assert spent <= every * 0.1 * 0.2 * (1 + 1e-9) and (
            every == 1 or spent > (every - 1) * 0.1 * 0.2
        )


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "always", None])
def test_what_is_no_cadence_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"possible: auto, off.*; or a number of steps"):
        check_replicate(wrong)
    for right in ("auto", "off", 1, 16):
        check_replicate(right)  # type: ignore[arg-type]


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 3, generator=generator)
    return {
        "rounds": [{"parts": 0.25, "changes": [x, x.double().t(), x.to(torch.bfloat16)]}, None],
        "residuals": [{"residual": x[:, :2], "inner": {}}, {"nothing": torch.empty(0)}],
        "numbers": (seed, math.inf, torch.arange(3, dtype=torch.uint8)),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bring(shelf: CopyStore, owner: int, step: int, *, flip: int | None = None) -> str | None:
    """A copy comes, with one wrong bit perhaps."""
    label, pieces = pack_copy(state(step), step)
    label = CopyLabel.decode_label(label.encode_label())
    for place, piece in zip(shelf.prepare_memory(owner, label), pieces, strict=True):
        place.copy_(piece)
    if flip is not None:
        shelf._slots[owner][1].memory[flip] ^= 4
    return shelf.accept_copy(owner, label)


def copies(shelf: CopyStore, owner: int) -> list[int]:
    """The steps of the copies that can be used, which are what was sent."""
    found = list(shelf.read_copies(owner, lambda why: None))
    assert all(same(content, state(step)) for step, content in found)
    return [step for step, _ in found]


def test_a_copy_is_what_was_sent() -> None:
    shelf = CopyStore()
    assert (
        bring(shelf, 3, 7) is None
        and bring(shelf, 4, 7) is None
        and shelf.held_steps == {3: 7, 4: 7}
    )
    assert copies(shelf, 3) == [7] and copies(shelf, 5) == []
    assert (
        bring(shelf, 3, 8) is None
        and shelf.held_steps == {3: 8, 4: 7}
        and copies(shelf, 3) == [8, 7]
    )
    bring(shelf, 5, 8)
    shelf.keep_only(owner for owner in (4, 5))
    assert shelf.held_steps == {4: 7, 5: 8} and copies(shelf, 3) == []


def test_one_with_a_wrong_bit_is_refused_and_the_older_one_is_used() -> None:
    shelf = CopyStore()
    assert (
        "there is no older one" in str(bring(shelf, 3, 6, flip=5))
        and shelf.held_steps == {}
        and copies(shelf, 3) == []
    )
    bring(shelf, 3, 7)
    assert (
        "a copy as of step 8 was refused" in (why := str(bring(shelf, 3, 8, flip=0)))
        and "as of step 7 is kept" in why
    )
    assert shelf.held_steps == {3: 7} and copies(shelf, 3) == [7]
    assert bring(shelf, 3, 9) is None and copies(shelf, 3) == [9, 7]


def test_one_under_another_label_is_refused() -> None:
    shelf, (label, pieces) = CopyStore(), pack_copy(state(1), 4)
    wrong = label._replace(tensor_checksums=[*label.tensor_checksums[1:], 3])
    for place, piece in zip(shelf.prepare_memory(0, wrong), pieces, strict=True):
        place.copy_(piece)
    assert "its bytes are not those that were sent" in str(shelf.accept_copy(0, wrong))
    others = [label._replace(step=5), label._replace(tree={"a": 1}), wrong]
    assert all(
        not torch.equal(other.end_marker, label.end_marker) for other in others
    ) and torch.equal(CopyLabel.decode_label(label.encode_label()).end_marker, label.end_marker)


def test_while_one_comes_the_newest_whole_one_stays() -> None:
    shelf = CopyStore()
    bring(shelf, 3, 7)
    bring(shelf, 3, 8)
    label, pieces = pack_copy(state(9), 9)
    shelf.prepare_memory(3, label)[0].copy_(pieces[0])  # and the owner dies
    assert shelf.held_steps == {3: 8} and copies(shelf, 3) == [8]
    room = shelf._slots[3][1].memory
    shelf.abandon_copy(3)
    assert copies(shelf, 3) == [8] and bring(shelf, 3, 10) is None and copies(shelf, 3) == [10, 8]
    # something may still be written there
    assert all(place.memory.data_ptr() != room.data_ptr() for place in shelf._slots[3])


def test_memory_is_used_again() -> None:
    shelf = CopyStore()
    places = set()
    for step in range(6):
        bring(shelf, 3, step)
        places |= {place.memory.data_ptr() for place in shelf._slots[3] if place.memory.numel()}
    assert len(places) == 2


def test_one_that_has_changed_since_it_came_is_not_used() -> None:
    shelf, refused = CopyStore(), list[str]()
    bring(shelf, 3, 7)
    bring(shelf, 3, 8)
    shelf._slots[3][0].memory[2] ^= 1
    assert [step for step, _ in shelf.read_copies(3, refused.append)] == [7]
    assert len(refused) == 1 and "as of step 8 has changed" in refused[0]


def test_one_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    written = pack_copy(state(1), 4)[0].encode_label()
    monkeypatch.setattr(state_copies, "LABEL_FORM", 2)
    with pytest.raises(
        CheckpointError, match="a copy of form 1 can't be kept, this version of paceline knows 2"
    ):
        CopyLabel.decode_label(written)


def test_nothing_in_a_label_is_more_than_json() -> None:
    label, _ = pack_copy(state(1), 4)
    assert json.loads(label.encode_label())[0] == state_copies.LABEL_FORM
    assert CopyLabel.decode_label(label.encode_label()) == label
