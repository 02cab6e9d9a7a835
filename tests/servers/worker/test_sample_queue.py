"""Workers that take their samples when they are ready for them, in whole runs on threads: what
each trains, and what happens around it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from paceline.errors import DataError, UsageError
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness.jobs import wait_for
from tests.harness.parameter_servers import (
    ASP,
    BACKUP,
    EACH,
    SSP,
    Numbers,
    Table,
    epoch,
    table,
    turn,
)
from tests.harness.runs import parameters, workers


class TestWhatIsTrained:
    @pytest.mark.each_choice
    @pytest.mark.parametrize("strategy", [ASP, SSP], ids=repr)
    @pytest.mark.parametrize("size", [2, 4])
    def test_every_sample_once_by_one_worker_and_its_gradient_is_in_the_weights(
        self, strategy: ParameterServer, size: int
    ) -> None:
        """The mean over a share of 6 / size, by a learning rate of size / 6 of 1: each weight
        moves by 1/6, whoever trains it.
        """
        found = epoch(strategy, size, epochs=2)
        assert sorted(chain(*(ids for ids, _, _ in found))) == sorted([*range(60)] * 2)
        for _, weights, steps in found:
            assert torch.allclose(
                weights, torch.full((60,), -2 / 6, dtype=torch.float64), rtol=1e-12
            )
            assert steps == found[0][2]

    def test_quick_workers_train_more(self) -> None:
        turns = [0, 0, 0]

        def slow(rank: int) -> float:
            """Rank 1 waits in each of its turns for six of the others, as long as there are so
            many.
            """
            turns[rank] += 1
            if rank == 1:
                wait_for(lambda: turns[0] + turns[2] >= min(6 * turns[1], 28 - turns[1]))
            return 0.0

        taken = [len(ids) for ids, _, _ in epoch(ASP, slow=slow)]
        assert sum(taken) == 60 and taken[1] < 15, (
            "a third would be 20, and 2 of 14 by their speeds"
        )
        bounded = epoch(ParameterServer(1, 1), slow=lambda rank: 0.03 if rank == 1 else 0.002)
        assert all(14 <= len(ids) <= 26 for ids, _, _ in bounded), "the bound keeps them together"

    def test_shares_are_how_much_is_taken_at_a_time(self) -> None:
        """Each sample still counts the same."""
        found = epoch(ASP, shares=[1, 1, 4])
        assert torch.allclose(found[0][1], torch.full((60,), -1 / 6, dtype=torch.float64))

    def test_parts_of_an_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Indices that are too many are drawn in parts: the same samples."""
        monkeypatch.setattr("paceline.data.dynamic.INDICES_AT_ONCE", 12)
        for strategy in (ASP, BACKUP):
            found = epoch(strategy, count=31, epochs=2)
            assert {*chain(*(ids for ids, _, _ in found))} == {*range(31)}
            if strategy is ASP:
                assert sum(len(ids) for ids, _, _ in found) == 62

    def test_batches_of_the_users_own(self) -> None:
        def body(run: Run) -> list[int]:
            model = Table(20)
            sampler = BatchSampler(SequentialSampler(range(20)), 7, drop_last=False)
            loader: Any = DataLoader(Numbers(20), batch_sampler=sampler)
            model, optimizer, loader = run.prepare(
                model, torch.optim.SGD(model.parameters(), 1.0), loader
            )
            mine: list[int] = []
            for ids in loader:
                mine += ids.tolist()
                turn(model, optimizer, ids)
            return mine

        assert sorted(chain(*workers(3, body, strategy=ASP))) == [*range(20)]


def test_a_schedule_that_a_quick_worker_has_ended_stays_there() -> None:
    """It has more turns than the epoch has batches for each."""
    turns = [0, 0]

    def body(run: Run) -> tuple[int, int, float]:
        model, optimizer, loader = table(run, 60, 6)
        schedule = run.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10))
        for ids in loader:
            turns[run.rank] += 1
            # waits in each turn for two of the other, as long as there are so many
            if run.rank == 1:
                wait_for(lambda: turns[0] >= min(2 * turns[1] + 2, 18 - turns[1]))
            turn(model, optimizer, ids)
            schedule.step()
        return turns[run.rank], schedule.last_epoch, schedule.get_last_lr()[0]

    (quick, ended, rate), (slow, mine, _) = workers(2, body, strategy=ASP)
    assert quick > 10 and ended == 9 and rate < 1e-4 and slow == mine < 10


@pytest.mark.alike(2)
@EACH
class TestTheRestOfARun:
    def test_losses_are_logged_and_samples_are_counted(
        self, strategy: ParameterServer, tmp_path: Path
    ) -> None:
        def body(run: Run) -> tuple[int, int, float]:
            model, optimizer, loader = table(run)
            for _ in run.epochs(2):
                for ids in loader:
                    run.log(loss=3.0, mine=float(run.rank))
                    turn(model, optimizer, ids)
                mean = run.mean(float(run.rank))
            return run.steps, len(loader), mean

        found = workers(3, body, strategy=strategy, folder=tmp_path)
        assert found[0] == found[1] == found[2] and found[0][2] == 1.0
        folder = next(tmp_path.rglob("summary.json")).parent
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["samples"] == 120 and summary["final_loss"] == 3.0
        assert (
            sum(summary["servers"][0]["staleness"].values()) > 0
            and summary["servers"][1]["bytes"] > 0
        )
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert (
            sum(line["samples"] for line in lines) == summary["samples"]
            and len(lines) == summary["steps"]
        )
        assert {line["loss"] for line in lines} == {3.0} and [
            line["step"] for line in lines
        ] == sorted(line["step"] for line in lines)

    def test_a_break_leaves_the_others_alone(self, strategy: ParameterServer) -> None:
        """Each stops where it likes; they come together after it."""

        def body(run: Run) -> tuple[int, float, Tensor]:
            model, optimizer, loader = table(run, count=120)
            for _ in run.epochs(2):
                for number, ids in enumerate(loader):
                    turn(model, optimizer, ids)
                    if number == run.rank + 2:
                        break
                total = run.mean(1.0)
            return run.steps, total, parameters(model)

        found = workers(3, body, strategy=strategy)
        assert {steps for steps, _, _ in found} == {10} and all(
            torch.equal(found[0][2], weights) for _, _, weights in found
        )

    def test_stopping_early(self, strategy: ParameterServer) -> None:
        def body(run: Run) -> int:
            model, optimizer, loader = table(run, count=6000)
            turns = 0
            for _ in run.epochs(5):
                for ids in loader:
                    if run.rank == 1 and turns == 3:
                        run.stop()
                    if run.rank != 1 and turns > 100:
                        time.sleep(0.1)  # rank 1 has time to come to its fourth turn
                    turn(model, optimizer, ids)
                    run._collector._meetings.next_server = 0  # hand over in each step
                    turns += 1
            return turns

        assert all(turns < 1500 for turns in workers(3, body, strategy=strategy))

    def test_saved_between_epochs_and_resumed(
        self, strategy: ParameterServer, tmp_path: Path
    ) -> None:
        def body(run: Run, again: bool) -> Tensor:
            model, optimizer, loader = table(run)
            assert run.resume() == again
            for _ in run.epochs(2):
                for ids in loader:
                    turn(model, optimizer, ids)
                run.save()
                if not again:
                    break
            return parameters(model)

        first = workers(3, lambda run: body(run, False), strategy=strategy, folder=tmp_path)
        second = workers(2, lambda run: body(run, True), strategy=strategy, folder=tmp_path)
        assert all(torch.equal(first[0], other) for other in first) and torch.equal(*second)
        if not strategy.backup_workers:
            assert torch.allclose(
                first[0], torch.full((60,), -1 / 6, dtype=torch.float64)
            ) and torch.allclose(second[0], 2 * first[0])

    def test_calls_of_all_inside_the_loop(self, strategy: ParameterServer) -> None:
        for call in (lambda run: run.mean(1.0), lambda run: run.barrier(), lambda run: run.save()):

            def body(run: Run, call: Any = call) -> None:
                model, optimizer, loader = table(run)
                for ids in loader:
                    turn(model, optimizer, ids)
                    with pytest.raises(
                        UsageError,
                        match="are not in lockstep inside the loop over a training loader",
                    ):
                        call(run)

            workers(2, body, strategy=strategy)

    def test_evaluation_is_dealt_as_ever(self, strategy: ParameterServer) -> None:
        def body(run: Run) -> list[int]:
            model, optimizer, loader = table(run)
            tested = run.prepare(DataLoader(Numbers(17), 5), train=False)
            rows: list[int] = []
            for ids in loader:
                turn(model, optimizer, ids)
            for ids in tested:
                rows += run.gather(ids).tolist()
            return rows

        assert workers(3, body, strategy=strategy) == [[*range(17)]] * 3

    def test_one_worker_alone(self, strategy: ParameterServer) -> None:
        if strategy.backup_workers:
            with pytest.raises(UsageError, match="leaves none to wait for"):
                epoch(ParameterServer(backup_workers=2), 1)
        ((mine, weights, steps),) = epoch(strategy, 1)
        assert (
            sorted(mine) == [*range(60)]
            and steps == 10
            and torch.allclose(weights, torch.full((60,), -1 / 6, dtype=torch.float64))
        )


def test_schedules_go_with_each_worker() -> None:
    def body(run: Run) -> Tensor:
        model = Table(20)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler, loader = run.prepare(
            model, optimizer, scheduler, DataLoader(Numbers(20), 4)
        )
        for _ in run.epochs(3):
            for ids in loader:
                turn(model, optimizer, ids)
            scheduler.step()
        return parameters(model)

    assert torch.allclose(
        workers(2, body, strategy=ASP)[0], torch.full((20,), -1.75 / 4, dtype=torch.float64)
    )


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


REFUSED: dict[str, tuple[Callable[[Run], Any], str]] = {
    "weights": (lambda run: table(run, weigh=len), "weigh= has all workers add up"),
    "a stream": (
        lambda run: run.prepare(nn.Linear(1, 1), DataLoader(Stream(), 2)),
        "a stream .* is dealt step by step",
    ),
    "BatchNorm": (
        lambda run: run.prepare(nn.BatchNorm1d(2)),
        "BatchNorm layers, which combine the statistics of all",
    ),
    "no share": (
        lambda run: next(iter(table(run, shares=[1, 0])[2])),
        "a worker with a share of 0 never trains",
    ),
    "whole batches": (
        lambda run: next(
            iter(run.prepare(nn.Linear(1, 1), DataLoader(Numbers(4), batch_size=None))[1])
        ),
        "each item of this",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_workers_in_each_step_is_refused(name: str) -> None:
    act, why = REFUSED[name]

    def body(run: Run) -> None:
        with pytest.raises((UsageError, DataError), match=why):
            act(run)

    workers(2, body, strategy=ASP)
