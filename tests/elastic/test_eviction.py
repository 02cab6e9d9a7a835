"""Who makes the others wait again and again leaves, and nobody can tell from what came out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from paceline.elastic import eviction
from paceline.elastic.eviction import LATE_LOOKS, Eviction, LateCount
from paceline.errors import UsageError
from paceline.sync.abilities import Abilities
from paceline.unequal.stragglers.stragglers import FLUSHES, Judgement
from tests.harness.jobs import Jobs
from tests.harness.survivors import check, play

HOSTS = ("a", "a", "b", "b")
LATE, NOBODY = (
    Judgement(frozenset({2}), (0.1, 0.1, 0.2, 0.1), "stolen"),
    Judgement(frozenset(), (0.1,) * 4, "compute"),
)


def test_three_looks_in_a_row_of_other_flushes_are_needed() -> None:
    found = LateCount()
    answers = [found.count_late_ranks(range(4), LATE) for _ in range(LATE_LOOKS * FLUSHES)]
    assert answers == [None] * (LATE_LOOKS * FLUSHES - 1) + [2]


def test_a_look_without_it_begins_anew() -> None:
    found = LateCount()
    looks = [LATE, LATE, NOBODY, LATE, LATE]
    assert [found.count_late_ranks(range(4), look) for look in looks for _ in range(FLUSHES)] == [
        None
    ] * FLUSHES * len(looks)
    assert [found.count_late_ranks(range(4), LATE) for _ in range(FLUSHES)][-1] == 2


def test_the_latest_of_several_goes_first() -> None:
    found, both = LateCount(), Judgement(frozenset({1, 3}), (0.1, 0.2, 0.1, 0.3), "compute")
    assert [found.count_late_ranks(range(4), both) for _ in range(LATE_LOOKS * FLUSHES)][-1] == 3


def evictions(size: int, needed: int) -> tuple[list[Eviction], MagicMock, list[MagicMock]]:
    """One on each worker; what was told; and what has each leave."""
    history, leaving = MagicMock(), [MagicMock() for _ in range(size)]
    view = cast(
        "Any", SimpleNamespace(worker=SimpleNamespace(place=SimpleNamespace(min_workers=needed)))
    )
    return [Eviction(view, each, history) for each in leaving], history, leaving


def judge(found: list[Eviction], names: list[int], times: int = LATE_LOOKS * FLUSHES) -> None:
    for _ in range(times):
        for rank, each in enumerate(found):
            each.handle_judgement(names, LATE, HOSTS, rank)


def test_it_goes_and_nobody_else() -> None:
    found, history, leaving = evictions(4, 3)
    judge(found, [0, 1, 2, 3])
    assert [each.release_worker.called for each in leaving] == [False, False, True, False]
    text = (
        "rank 2 on b was late in 3 looks in a row, for stolen processor: "
        "it leaves, and its samples are dealt to the others"
    )
    assert {call.args for call in history.announce_event.call_args_list} == {(text,)}


def test_never_fewer_than_the_job_needs() -> None:
    found, history, leaving = evictions(4, 4)
    judge(found, [0, 1, 2, 3], 10 * LATE_LOOKS * FLUSHES)
    assert not any(each.release_worker.called for each in leaving)
    assert len(history.announce_event.call_args_list) == 4  # once by each
    assert (
        "stays: the job needs 4 workers (--min-workers)" in history.announce_event.call_args.args[0]
    )


def test_other_workers_are_counted_anew() -> None:
    found, _, leaving = evictions(4, 1)
    judge(found, [0, 1, 2, 3], LATE_LOOKS * FLUSHES - 1)
    judge(found, [0, 1, 5, 3], 1)
    for rank, each in enumerate(found):
        each.handle_judgement([0, 1, 5, 3], None, HOSTS, rank)  # too little to judge by
    assert not any(each.release_worker.called for each in leaving)


def test_where_there_are_servers_it_is_refused() -> None:
    eviction.check_eviction(cast("Abilities", SimpleNamespace(remote=None, sample_queue=None)))
    with pytest.raises(UsageError, match=r"straggler='evict' is for strategies without servers"):
        eviction.check_eviction(
            cast("Abilities", SimpleNamespace(remote=object(), sample_queue=None))
        )


QUICK = """
    from paceline.record import log
    from paceline.unequal.stragglers import stragglers
    log._DRAIN_INTERVAL, stragglers.SECONDS, slow = 0.1, 0.2, run.rank == {slow}"""


@pytest.mark.alike(1)
@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 2])
def test_in_a_job(job: Jobs, slow: int) -> None:
    """The first worker leaves as well as another one; each sample counts once, and the weights
    are those of one process.
    """
    parts = {"epochs": 9, "nap": 0.0}
    wanted = play(job, "alone", workers=1, **parts)
    found = play(
        *(job, "three", "--min-workers", "2", "--straggler", "evict"),
        **(
            parts
            | {
                "workers": 3,
                "prepared": QUICK.format(slow=slow).strip(),
                "before": "time.sleep(0.03 + 0.3 * slow)",
            }
        ),
    )
    check(found, wanted)
    assert found.size == 2
    told = [event for event in found.events if "was late in 3 looks in a row" in event]
    assert [event.partition(" on ")[0] for event in told] == [
        f"rank {slow}"
    ] and "for compute: it leaves" in told[0]
