"""Faults as data: their notation, what is refused, and storms."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.lab import chaos
from paceline.lab.chaos import crash, cut, join, kill, link, slow, stop, storm
from paceline.lab.description import Description, Host, make_regular

WRITTEN = {
    "kill(rank=2, step=5)": kill(rank=2, step=5),
    "stop(rank=1, step=3, seconds=4)": stop(rank=1, step=3, seconds=4),
    "cut(host=1, seconds=3)": cut(host=1, seconds=3),
    "cut(host=1, seconds=0.5, step=7)": cut(host=1, seconds=0.5, step=7),
    "slow(host=0, factor=0.5, step=10)": slow(host=0, factor=0.5, step=10),
    "slow(host=0, factor=0.5, step=10, seconds=2)": slow(host=0, factor=0.5, step=10, seconds=2),
    "link(host=0, bandwidth='10mbit', step=20)": link(host=0, bandwidth="10mbit", step=20),
    "link(host=0, up='10mbit', down='1gbit', step=20)": link(
        host=0, up="10mbit", down="1gbit", step=20
    ),
    "crash(host=1)": crash(host=1),
    "crash(host=1, step=2)": crash(host=1, step=2),
    "join(host=2, step=30)": join(host=2, step=30),
    "storm(seed=1, faults=5, steps=40, kinds=('kill',))": storm(
        seed=1, faults=5, steps=40, kinds=["kill"]
    ),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_text_and_objects_are_the_same(text: str) -> None:
    fault = WRITTEN[text]
    assert chaos.parse_faults(text) == [fault]
    assert chaos.parse_faults(repr(fault)) == [fault]
    assert repr(fault) == text.replace("faults=5, ", "")  # defaults are left out


def test_lists_of_faults_objects_and_texts_become_one() -> None:
    one, two, three = kill(rank=0, step=1), cut(host=1, seconds=3), crash(host=0)
    assert chaos.parse_faults("[kill(rank=0, step=1), cut(host=1, seconds=3)]") == [one, two]
    assert chaos.parse_faults("kill(rank=0, step=1), cut(host=1, seconds=3)") == [one, two]
    assert chaos.collect_faults([one, "cut(host=1, seconds=3)", ["crash(host=0)"]]) == [
        one,
        two,
        three,
    ]
    assert chaos.collect_faults(()) == []


def test_what_the_issue_leaves_out_may_be_left_out() -> None:
    assert cut(host=0, seconds=1).step == crash(host=0).step == 0


WRONG: list[tuple[Any, str]] = [
    (
        "kil(rank=2, step=5)",
        r"the fault 'kil\(rank=2, step=5\)': kil is not a word.*did you mean kill\?",
    ),
    ("kill", r"the fault 'kill': kill stands alone"),
    ("kill(rank=2", r"the fault 'kill\(rank=2': .*can't be read.*for example crash"),
    ("kill(2, 5)", r"doesn't fit kill\(rank, step\)"),
    ("kill(rank=2)", r"missing a required argument: 'step'"),
    ("kill(rank=2, stepp=5)", r"kill has no argument stepp .*did you mean step\?"),
    (
        "kill(rank=2, step=-1)",
        r"kill\(rank=2, step=-1\): step is -1, and has to be a number of steps taken, from 0 on",
    ),
    ("kill(rank=2, step=1.5)", "step is 1.5"),
    ("kill(rank=True, step=1)", "rank is True"),
    ("kill(rank='two', step=1)", "rank is 'two'"),
    ("kill(rank=None, step=1)", "rank is None"),
    ("kill(rank=4, step=1)", r"kill\(rank=4, step=1\): there is no rank 4: 2x2 has ranks 0 to 3"),
    ("stop(rank=0, step=1, seconds=0)", "seconds is 0, and has to be a time in seconds, above 0"),
    ("stop(rank=0, step=1, seconds=inf)", "seconds is inf"),
    ("stop(rank=9, step=1, seconds=1)", "there is no rank 9"),
    (
        "cut(host=2, seconds=3)",
        r"cut\(host=2, seconds=3\): there is no host 2: 2x2 has hosts 0 to 1",
    ),
    ("cut(host=-1, seconds=3)", "host is -1"),
    ("slow(host=0, factor=0, step=1)", "factor is 0, and has to be above 0, and 1 at most"),
    ("slow(host=0, factor=1.5, step=1)", "factor is 1.5"),
    ("link(host=0, step=1)", r"changes nothing: give bandwidth='10mbit'"),
    ("link(host=0, bandwidth='10mbit', up='1mbit', step=1)", "up or down: leave one out"),
    ("link(host=0, bandwidth='ten', step=1)", r"link\(.*\): bandwidth is 'ten'.*100mbit"),
    ("link(host=0, up=True, step=1)", "up is True"),
    ("[join(host=1, step=1), join(host=1, step=2)]", "a host joins once"),
    ("[join(host=0, step=1), join(host=1, step=2)]", "there is no job to join"),
    (
        "[join(host=1, step=1), kill(rank=2, step=2)]",
        "there is no rank 2: 2x2 has ranks 0 to 1 at the start",
    ),
    ("storm(seed=-1)", "seed is -1"),
    ("storm(seed=1, faults=0)", "faults is 0"),
    ("storm(seed=1, steps=0)", "steps is 0"),
    ("storm(seed=1, kinds=('kil',))", r"there is no kind 'kil' in a storm; .*did you mean kill\?"),
    ("storm(seed=1, kinds=('join',))", "there is no kind 'join' in a storm"),
    ("storm(seed=1, kinds=())", "has no kinds"),
    ("storm(seed=1, seconds=(3, 1))", "has to be the shortest and the longest"),
    ("3", "3 in '3' isn't a fault: write it as"),
    ("__import__('os').system('true')", "is not part of the notation"),
    (3, "3 isn't a fault"),
    (None, "None isn't a fault"),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=[str(given) for given, _ in WRONG])
def test_what_can_not_be_is_refused(given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        chaos.list_faults(given, make_regular(2, 2))


def test_a_script_is_a_flat_list_with_the_storms_drawn() -> None:
    faults = chaos.list_faults(
        ["storm(seed=3, faults=4)", kill(rank=3, step=1)], make_regular(2, 2)
    )
    assert len(faults) == 5 and faults[-1] == kill(rank=3, step=1)
    assert chaos.list_faults([], make_regular(2, 2)) == []


def test_the_same_seed_draws_the_same_faults() -> None:
    cluster = make_regular(3, 2, bandwidth="1gbit")
    first = storm(seed=5, faults=40, steps=30).draw_faults(cluster)
    assert first == storm(seed=5, faults=40, steps=30).draw_faults(cluster)
    assert first != storm(seed=6, faults=40, steps=30).draw_faults(cluster)
    assert chaos.list_faults(repr(first), cluster) == first
    steps = [fault.step for fault in first]
    assert len(first) == 40 and steps == sorted(steps) and steps[0] >= 0 and steps[-1] < 30
    assert {type(fault) for fault in first} == {chaos.Stop, chaos.Cut, chaos.Slow, chaos.Link}
    assert {fault.host for fault in first if not isinstance(fault, chaos.Stop)} == {0, 1, 2}
    assert {fault.rank for fault in first if isinstance(fault, chaos.Stop)} <= set(range(6))


def test_a_storm_keeps_to_what_it_was_told() -> None:
    cluster = Description("two", (Host("a", up=10**8, down=10**9), Host("b")))
    drawn = storm(seed=1, faults=30, kinds=("link", "stop"), seconds=(2, 2)).draw_faults(cluster)
    assert {type(fault) for fault in drawn} == {chaos.Link, chaos.Stop}
    assert {fault.seconds for fault in drawn} == {2}
    rates = {fault.host: fault.sides()[0] for fault in drawn if isinstance(fault, chaos.Link)}
    # a part of the slower direction; of 1gbit without one
    assert 10**7 <= (rates[0] or 0) < 10**8 and 10**8 <= (rates[1] or 0) < 10**9
    lethal = storm(seed=1, faults=20, kinds=("kill", "crash")).draw_faults(cluster)
    assert {type(fault) for fault in lethal} == {chaos.Kill, chaos.Crash}


def test_a_storm_spares_hosts_that_join_later() -> None:
    cluster = make_regular(3, 2)
    faults = chaos.list_faults("[storm(seed=1, faults=40), join(host=0, step=9)]", cluster)
    assert {
        fault.host for fault in faults if isinstance(fault, chaos.Cut | chaos.Slow | chaos.Link)
    } == {1, 2}
    assert {fault.rank for fault in faults if isinstance(fault, chaos.Stop)} == {0, 1, 2, 3}
    assert chaos.absent_hosts(faults) == {0}
