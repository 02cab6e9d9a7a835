"""The benchmark of faults: what runs come to is counted right, on notes that are made up; nothing is launched."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.faults import __main__ as command
from benchmarks.faults import runs, systems
from benchmarks.faults.accounting import Notes, Turn, costs, moments, rolled_back, samples, surviving, usual
from benchmarks.faults.runs import Fault, Run, RunError, Training, schedule
from benchmarks.peers import places
from benchmarks.peers.catalogue import Setting
from benchmarks.peers.launchers import Start

WORKERS, SHARE = 3, 2
BATCH = WORKERS * SHARE


def given(step: int, rank: int, size: int = WORKERS) -> tuple[int, ...]:
    """The samples of a worker when `size` share the global batch."""
    whole = range(step * BATCH, (step + 1) * BATCH)
    return tuple(whole[rank * len(whole) // size : (rank + 1) * len(whole) // size])


def turn(worker: str, rank: int, step: int, at: float, *, attempt: int | None = 0, size: int = WORKERS, **more: Any) -> Turn:
    """A turn that went well, of half a second."""
    ids = more.pop("ids", given(step, rank))
    usual = {"attempt": attempt, "ended": at, "size": size, "taken": True, "counted": True}
    return Turn(worker, rank, step, ids, at - 0.5, **{**usual, **more})


def killed(worker: str, rank: int, step: int, at: float, attempt: int | None = 0) -> Turn:
    """A turn without an end."""
    return Turn(worker, rank, step, given(step, rank), at - 0.5, attempt)


def together(steps: Sequence[int], first: float, attempt: int = 0, crew: str = "abc") -> list[Turn]:
    """Steps that all workers take, one a second."""
    return [turn(who, rank, step, first + n, attempt=attempt) for n, step in enumerate(steps) for rank, who in enumerate(crew)]


def redealt() -> list[Turn]:
    """paceline: c dies in step 3, which a and b take with shares of three; d comes for step 5."""
    failed = [turn("a", 0, 3, 4.2, taken=False), turn("b", 1, 3, 4.2, taken=False), killed("c", 2, 3, 4.0)]
    alone = [
        turn(who, rank, step, at, attempt=1, size=2, ids=given(step, rank, 2))
        for step, at in ((3, 4.6), (4, 5.6))
        for rank, who in ((0, "a"), (1, "b"))
    ]
    return together(range(3), 1.0) + failed + alone + together(range(5, 12), 7.6, attempt=2, crew="abd")


def restarted() -> list[Turn]:
    """torchrun: b dies in step 5; all begin again from the checkpoint after step 3."""
    failed = [killed(who, rank, 5, 6.0) for rank, who in enumerate("abc")]
    return together(range(5), 1.0) + failed + together(range(3, 12), 14.0, attempt=1, crew="def")


def dropped() -> list[Turn]:
    """torchft: c dies in step 3, which the others don't commit, then take without it; d is healed in step 4, and counts from step 5 on."""
    failed = [turn(who, rank, 3, 4.2, attempt=1, taken=False) for rank, who in ((0, "a"), (1, "b"))] + [killed("c", 2, 3, 4.0, None)]
    two = [turn(who, rank, step, step + 2.2, attempt=step - 1, size=2) for step in (3, 4) for rank, who in ((0, "a"), (1, "b"))]
    healed = [turn("d", 2, 0, 6.2, attempt=3, size=2, taken=False, counted=False)]
    return together(range(3), 1.0, attempt=1) + failed + two + healed + together(range(5, 12), 7.2, attempt=4, crew="abd")


EPOCH = 12 * BATCH


# ---- samples


def test_a_run_that_nobody_disturbs() -> None:
    assert samples(together(range(12), 1.0), EPOCH) == (0, 0, 0)
    assert samples(together(range(12), 1.0), EPOCH + 5).lost == 5


def test_a_batch_that_is_dealt_again_is_trained_on_once() -> None:
    turns = redealt()
    assert {turn.worker for turn in surviving(turns)[3]} == {"a", "b"} and all(turn.attempt == 1 for turn in surviving(turns)[3])
    assert samples(turns, EPOCH) == (0, 0, BATCH)


def test_a_sample_in_two_surviving_turns_is_repeated() -> None:
    turns = redealt()
    again = next(turn for turn in turns if turn.step == 4)
    again.ids = (*again.ids, 3)
    assert samples(turns, EPOCH) == (0, 1, BATCH)


def test_steps_that_are_rolled_back_are_computed_in_vain() -> None:
    assert samples(restarted(), EPOCH) == (0, 0, 3 * BATCH)


def test_a_replica_that_is_away_loses_its_shard() -> None:
    turns = dropped()
    assert {turn.worker for turn in surviving(turns)[0]} == {"a", "b", "c"}  # not the one that was healed while it tried step 0
    assert samples(turns, EPOCH) == (2 * SHARE, 0, 2 * SHARE + SHARE + SHARE)  # steps 3 and 4; not committed, killed, healed


@pytest.mark.parametrize("attempt", [0, None])
def test_who_is_killed_after_its_gradients_have_arrived_counts(attempt: int | None) -> None:
    turns = together(range(3), 1.0)
    turns[-1] = killed("c", 2, 2, 3.0, attempt)
    assert samples(turns, 3 * BATCH) == (0, 0, 0)
    turns.append(killed("z", 0, 2, 3.5, 7))  # another attempt's, which came to nothing
    assert samples(turns, 3 * BATCH) == (0, 0, SHARE)
    del turns[-1]
    for other in turns[-3:-1]:
        other.size = 2  # the mean was over the others
    assert samples(turns, 3 * BATCH) == (SHARE, 0, SHARE)


def test_who_did_not_commit_what_others_did_counts() -> None:
    turns = together(range(3), 1.0)
    turns[-1].taken = False  # its all-reduce failed when it had given its part; it is healed
    assert samples(turns, 3 * BATCH) == (0, 0, 0)


def test_samples_of_another_epoch_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"\[66, 67, 68\] are not of this epoch"):
        samples(together(range(12), 1.0), EPOCH - BATCH)


# ---- seconds


def test_usual_steps_are_those_of_all_workers() -> None:
    assert usual(together(range(12), 1.0), WORKERS) == 1.0
    slow = [turn(who, rank, step, 1 + 9 * step, size=2) for step in range(9) for rank, who in ((0, "a"), (1, "b"))]
    later = together(range(9, 12), 100.0, attempt=1)
    assert usual(slow + later, WORKERS) == 1.0


def test_a_step_is_taken_when_the_last_worker_has_taken_it() -> None:
    turns = together(range(3), 1.0)
    turns[1].ended = 1.4
    assert moments(turns)[0] == 1.4


def test_a_batch_dealt_again_costs_its_second_half_turn() -> None:
    ((still, seconds, back),) = costs(redealt(), [4.1], WORKERS)
    assert still == pytest.approx(4.6 - 3.0 - 1.0)
    assert seconds == pytest.approx(7.6 - 3.0 - 3.0)  # steps 3, 4, 5
    assert back == 0


def test_a_restart_costs_what_is_computed_again_too() -> None:
    ((still, seconds, back),) = costs(restarted(), [5.9], WORKERS)
    assert still == seconds == pytest.approx(16.0 - 5.0 - 1.0)  # steps 3 and 4 again, then 5
    assert back == 2


def test_steps_with_fewer_samples_are_no_gain() -> None:
    ((still, seconds, back),) = costs(dropped(), [4.1], WORKERS)
    assert still == pytest.approx(5.2 - 3.0 - 1.0) and back == 0
    assert seconds == pytest.approx(7.2 - 3.0 - (4 + 4 + 6) / 6)


def test_a_fault_before_the_end_lasts_until_the_end() -> None:
    turns = [turn for turn in redealt() if turn.step < 5]
    ((_, seconds, _),) = costs(turns, [4.1], WORKERS)
    assert seconds == pytest.approx(5.6 - 3.0 - 2.0)


def test_each_fault_has_its_own_steps_back() -> None:
    turns = restarted() + together(range(10, 14), 40.0, attempt=2, crew="ghi")
    assert [rolled_back(turns, kill) for kill in (5.9, 22.9)] == [2, 2]


def test_a_fault_does_not_pay_for_the_next_one() -> None:
    alone = costs(restarted(), [5.9], WORKERS)
    both = costs(restarted() + together(range(3, 14), 40.0, attempt=2, crew="ghi"), [5.9, 22.9], WORKERS)
    assert both[:1] == alone  # although its steps are rolled back once more
    assert both[1].still == pytest.approx(49.0 - 22.0 - 1.0) and both[1].back == 9


# ---- notes


def test_notes_are_read_as_they_are_written(tmp_path: Path) -> None:
    from benchmarks.faults import task

    journal, notes = task.Journal(tmp_path), Notes(tmp_path)
    journal.began(2, 7, [3, 4])
    notes.poll()
    (found,) = notes.turns
    assert (found.rank, found.step, found.ids, found.attempt, found.ended, found.taken) == (2, 7, (3, 4), None, math.inf, False)
    journal.ended(5, 3, counted=False)
    with next(tmp_path.iterdir()).open("a") as torn:
        torn.write('{"rank": 2, "st')
    notes.poll()
    assert notes.turns == [found] and (found.attempt, found.size, found.taken, found.counted) == (5, 3, True, False)
    assert found.began < found.ended < time.monotonic()
    assert notes.latest == {found.worker: found}


def test_who_tries_a_step_again_had_not_taken_it(tmp_path: Path) -> None:
    from benchmarks.faults import task

    journal, notes = task.Journal(tmp_path), Notes(tmp_path)
    for step, attempt in ((7, 0), (7, 1), (8, 1)):
        journal.began(0, step, [step], attempt)
        journal.ended(attempt, 2)
    notes.poll()
    assert [turn.taken for turn in notes.turns] == [False, True, True]


def test_weights_have_to_be_alike(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0)):
        torch.save(torch.full((2,), value), tmp_path / f"weights-{name}.pt")
    assert runs.away(runs.weights(tmp_path), torch.tensor([1.0, 1.0])) == 0
    torch.save(torch.zeros(2), tmp_path / "weights-c.pt")
    with pytest.raises(RunError, match="final weights differ"):
        runs.weights(tmp_path)


def test_a_run_without_all_steps_is_none() -> None:
    with pytest.raises(RunError, match="11 of 12 steps"):
        runs.summary(together(range(11), 1.0), Training("small", WORKERS, SHARE, 12, 10), [], torch.zeros(1))


# ---- what is launched, and killed


def test_the_schedule_is_that_of_its_seed() -> None:
    assert schedule(3, 4, 4) == schedule(3, 4, 4) != schedule(4, 4, 4)
    assert {fault.rank for seed in range(9) for fault in schedule(seed, 4, 4)} == set(range(4))
    assert all(runs.AFTER[0] <= fault.seconds <= runs.AFTER[1] for fault in schedule(0, 9, 4))


def test_all_systems_get_the_same_training(tmp_path: Path) -> None:
    place = places.Here(4, tmp_path)
    words = Training("small", 4, 2, 30, 60).words(tmp_path)
    for system in systems.systems([7]).values():
        started = [start for start in system.starts(systems.Job(place, 4, 3, words)) if not start.helper]
        assert len(started) == (4 if system.name == "torchft" else 1)
        for start in started:
            line = " ".join(start.command)
            assert " ".join(words) in line and ("--restarts 3" in line or "--max-restarts 3" in line)
    (ddp,) = systems.systems([7])["torchrun-7"].starts(systems.Job(place, 4, 3, words))
    assert ddp.command[-2:] == ("--every", "7") and ddp.environ == systems.FRESH_STORE


def scripted(text: str) -> systems.System:
    """A system whose launcher is a few lines of Python."""
    return systems.System("scripted", "scripted", lambda job: [Start(0, (sys.executable, "-c", text, *job.words))])


@pytest.mark.jobs
def test_a_run_ends_at_its_deadline(tmp_path: Path) -> None:
    idle = scripted("import time; print('RuntimeError: no luck', flush=True); time.sleep(600)")
    for deadline in (1, 20, 60):  # on a busy machine it may be long until there is output
        with places.place(Setting("faults", "", 1, 2)) as here, pytest.raises(RunError, match=f"not done after {deadline} s") as caught:
            runs.run(idle, Training("small", 2, 1, 5, float(deadline)), [Fault(0, 0.1)], here, tmp_path / str(deadline))
        assert len(list((tmp_path / str(deadline)).glob("scripted-*/log"))) == 1
        if "it last said: Runtime" in str(caught.value):
            break
    assert "it last said: Runtime" in str(caught.value)


@pytest.mark.jobs
def test_a_run_without_weights_says_why() -> None:
    failing = scripted("raise RuntimeError('no luck')")
    with places.place(Setting("faults", "", 1, 2)) as here, pytest.raises(RunError, match=r"exit codes \[1\]: RuntimeError: no luck"):
        runs.run(failing, Training("small", 2, 1, 5, 30.0), [Fault(0, 0.1)], here)


# Lines as task.Journal writes them, without torch: turns of 10 ms.
TALKER = """
import json, os, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
with open(f"{out}/turns-{os.getpid()}", "a", buffering=1) as file:
    for step in range(10_000):
        file.write(json.dumps({"rank": 0, "step": step, "ids": [step], "attempt": 0, "at": time.monotonic()}) + "\\n")
        time.sleep(0.01)
        file.write(json.dumps({"attempt": 0, "size": 1, "taken": True, "counted": True, "at": time.monotonic()}) + "\\n")
"""


@pytest.mark.jobs
def test_a_worker_is_killed_when_the_run_is_steady(tmp_path: Path) -> None:
    with places.place(Setting("faults", "", 1, 1)) as here:
        running = Run(scripted(TALKER), Training("small", 1, 1, 10_000, 30.0), 1, here, tmp_path)
        try:
            step_state = running.kill(Fault(0, 0.3))
            assert step_state is not None
            assert running.kill(Fault(0, 0.3)) is None, "nobody is left"
            running.notes.poll()
            ended = [turn.ended for turn in running.notes.turns if turn.taken]
            assert len(ended) > runs.STEADY and max(ended) <= step_state
            assert step_state - sorted(ended)[runs.STEADY - 1] >= 0.3
        finally:
            running.close()


@pytest.mark.jobs
def test_nobody_else_is_killed(tmp_path: Path) -> None:
    with places.place(Setting("faults", "", 1, 1)) as here:
        running = Run(scripted(TALKER), Training("small", 1, 1, 10_000, 30.0), 1, here, tmp_path)
        try:
            with pytest.raises(RunError, match="no worker of rank 2 is alive"):
                running.kill(Fault(2, 0.1))
        finally:
            running.close()


# ---- the table


def record(system: str, faults: int, **more: Any) -> dict[str, Any]:
    cost = {"still": 0.2, "seconds": 3.0, "back": 0}
    counts = {"lost": 0, "repeated": 0, "vain": 8 * faults}
    return {"system": system, "round": 0, "step": 0.05, "samples": counts, "faults": [cost] * faults, "away": 0.0, **more}


def test_rows_are_medians_and_counts_for_each_fault() -> None:
    chosen = [system for name, system in systems.systems([10]).items() if name != "torchft"]
    dear = {"still": 9.0, "seconds": 9.0, "back": 4}
    lossy = {"lost": 6, "repeated": 2, "vain": 24}
    records = [record("paceline", 0, step=0.07), record("paceline", 2, step=0.03), record("torchrun-10", 3, samples=lossy, away=0.5)]
    records[2]["faults"][2] = dear
    records.append({"system": "torchrun-10", "round": 1, "why": "it hung"})
    ours, theirs = command.summarise(records, chosen)
    assert (ours["still"], ours["vain"], ours["lost"], ours["step"], ours["faults"]) == (0.2, 8, 0, 0.05, 2)
    assert (theirs["still"], theirs["worst"], theirs["lost"], theirs["repeated"], theirs["away"]) == (0.2, 9.0, 2, 2 / 3, 0.5)
    lines = command.table([ours, theirs]).splitlines()
    assert lines[2] == "| paceline | 0.20 s (0.20 s) | 3.0 s | 0 | 0 | 0 | 8 | 0 | 50 ms |"
    assert lines[3].startswith("| torchrun, checkpoint every 10 steps (1 runs failed) | 0.20 s (9.00 s) |")
    assert {line.count("|") for line in lines} == {10}
    assert "no figures" in command.table(command.summarise(records[3:], chosen))


@pytest.mark.parametrize("change", [{"lost": 1}, {"repeated": 1}, {"still": 2.0}, {"failed": ["it hung"]}])
def test_the_bar_is_missed(change: dict[str, Any]) -> None:
    row = {"system": "paceline", "faults": 1, "failed": [], "still": 0.2, "lost": 0, "repeated": 0}
    other = {"system": "torchft", "faults": 1, "failed": [], "still": 1.0, "lost": 9, "repeated": 0}
    assert command.held([row, other]) and not command.held([row | change, other])


def test_options_choose_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*words: str) -> list[str]:
        return [system.name for system in command.choose(command.arguments().parse_args(words))]

    monkeypatch.setattr("benchmarks.peers.environments.made", lambda name: True)
    assert chosen() == ["paceline", "torchrun-10", "torchrun-50", "torchft"]
    assert chosen("--every", "5", "--only", "torchrun-5", "paceline") == ["torchrun-5", "paceline"]
    with pytest.raises(SystemExit, match="--only horovod: possible are paceline, torchrun-10, torchrun-50, torchft"):
        chosen("--only", "horovod")
    made: list[str] = []
    monkeypatch.setattr("benchmarks.peers.environments.made", lambda name: name is None)
    monkeypatch.setattr("benchmarks.peers.environments.make", made.append)
    with pytest.raises(SystemExit, match="the environment of torchft is missing: give --install"):
        chosen()
    assert chosen("--only", "paceline") == ["paceline"] and not made
    assert len(chosen("--install")) == 4 and made == ["torchft"]


def test_rounds_begin_undisturbed_and_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def come(system: systems.System, training: Training, faults: Sequence[Fault], *_: Any) -> dict[str, Any]:
        seen.append((system.name, len(faults)))
        if system.name == "torchrun-10" and faults:
            raise RunError("it hung")
        return {**record(system.name, len(faults)), "weights": torch.ones(3) * (2 if faults else 1)}

    monkeypatch.setattr(command, "run", come)
    options: argparse.Namespace = command.arguments().parse_args(["--rounds", "2", "--faults", "1", "--every", "10"])
    found = command.measure(options, list(systems.systems([10]).values()))
    assert seen[:3] == [(name, 0) for name in ("torchft", "paceline", "torchrun-10")]
    assert [name for name, _ in seen[3:]] == ["paceline", "torchrun-10", "torchft", "torchrun-10", "torchft", "paceline"]
    assert [record.get("away") for record in found] == [0.0, 0.0, 0.0, 1.0, None, 1.0, None, 1.0, 1.0]
    assert [record["why"] for record in found if "why" in record] == ["it hung"] * 2
    assert len({json.dumps(record["schedule"]) for record in found}) == 3  # none, and another for each round
