"""Workers that are not in lockstep, in whole runs on threads: what each trains, what its parameters hold, and how far it goes ahead."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from paceline.errors import DataError, DeadlineExceeded, UsageError
from paceline.session.run import Run
from paceline.sync.parameterserver.strategy import ParameterServer
from tests.harness.parameter_servers import ASP, BACKUP, EACH, REQUEUE, SSP, Numbers, Table, epoch, table, turn
from tests.harness.runs import parameters, workers


class TestWhatIsTrained:
    @pytest.mark.parametrize("strategy", [ASP, SSP], ids=repr)
    @pytest.mark.parametrize("size", [2, 4])
    def test_every_sample_once_by_one_worker_and_its_gradient_is_in_the_weights(self, strategy: ParameterServer, size: int) -> None:
        """The mean over a share of 6 / size, by a learning rate of size / 6 of 1: each weight moves by 1/6, whoever trains it."""
        found = epoch(strategy, size, epochs=2)
        assert sorted(chain(*(ids for ids, _, _ in found))) == sorted([*range(60)] * 2)
        for _, weights, steps in found:
            assert torch.allclose(weights, torch.full((60,), -2 / 6, dtype=torch.float64), rtol=1e-12)
            assert steps == found[0][2]

    def test_quick_workers_train_more(self) -> None:
        found = epoch(ASP, slow=lambda rank: 0.03 if rank == 1 else 0.002)
        taken = [len(ids) for ids, _, _ in found]
        assert sum(taken) == 60 and taken[1] < 15, "a third would be 20, and 2 of 32 by their speeds"
        bounded = epoch(ParameterServer(1, 1), slow=lambda rank: 0.03 if rank == 1 else 0.002)
        assert all(14 <= len(ids) <= 26 for ids, _, _ in bounded), "the bound keeps them together"

    def test_shares_are_how_much_is_taken_at_a_time(self) -> None:
        """Each sample still counts the same."""
        found = epoch(ASP, shares=[1, 1, 4])
        assert torch.allclose(found[0][1], torch.full((60,), -1 / 6, dtype=torch.float64))

    def test_micro_batches(self) -> None:
        found = epoch(SSP, 2, accumulate=3)
        assert sorted(chain(*(ids for ids, _, _ in found))) == [*range(60)]
        assert torch.allclose(found[0][1], torch.full((60,), -1 / 6, dtype=torch.float64))

    def test_parts_of_an_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Indices that are too many are drawn in parts: the same samples."""
        monkeypatch.setattr("paceline.data.dynamic.PART", 24)
        for strategy in (ASP, REQUEUE):
            found = epoch(strategy, count=63, epochs=2)
            assert {*chain(*(ids for ids, _, _ in found))} == {*range(63)}
            if strategy is ASP:
                assert sum(len(ids) for ids, _, _ in found) == 126

    def test_batches_of_the_users_own(self) -> None:
        def body(run: Run) -> list[int]:
            model = Table(20)
            sampler = BatchSampler(SequentialSampler(range(20)), 7, drop_last=False)
            loader: Any = DataLoader(Numbers(20), batch_sampler=sampler)
            model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 1.0), loader)
            mine: list[int] = []
            for ids in loader:
                mine += ids.tolist()
                turn(model, optimizer, ids)
            return mine

        assert sorted(chain(*workers(3, body, strategy=ASP))) == [*range(20)]


class TestTheBound:
    def bounded(self, bound: int, seed: int, size: int = 3) -> list[int]:
        """How far each turn of each worker began ahead of the slowest; what it had to have of the others, it had."""
        chance = [random.Random(100 * seed + rank) for rank in range(size)]
        done, left, leads = [0] * size, [False] * size, list[int]()

        def body(run: Run) -> None:
            me, of = run.rank, 1 / size
            model = nn.Linear(1, 1, bias=False).double()
            nn.init.zeros_(model.weight)
            loader = DataLoader(Numbers(size * 24), size)
            ready, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 1.0), loader)
            run.barrier()
            for ids in loader:
                others = [done[rank] for rank in range(size) if rank != me and not left[rank]]
                leads.append(done[me] - min([*others, done[me]]))
                sent = -float(model.weight.detach()) / of  # gradients are 1, so this counts what is in the parameters
                mine = done[me] - min(bound, 1)  # who is late goes on before its gradient is in a step
                least = max(mine, 0) + sum(max(done[me] - bound, 0) for rank in range(size) if rank != me and not left[rank])
                assert sent > least - 1e-6, f"worker {me} at {done[me]} has {sent:g} gradients, and should have {least}"
                assert bound or abs(sent - size * done[me]) < 1e-9, f"worker {me} at {done[me]} has {sent:g} gradients in lockstep"
                stalls = seed == me == 0 < bound and done[me] == 8  # so that the bound is reached in one run at least
                time.sleep(0.6 if stalls else chance[me].choice([0.0, 0.0, 0.0, 0.01]))
                ready(torch.ones(len(ids), 1).double()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                done[me] += 1
            left[me] = True

        strategy = ParameterServer(2, bound) if bound else ParameterServer(2)
        workers(size, body, strategy=strategy)
        return leads

    @pytest.mark.parametrize("runs", [2, pytest.param(200, marks=pytest.mark.soak)])
    @pytest.mark.parametrize("bound", [1, 3])
    def test_is_kept_and_reached(self, bound: int, runs: int) -> None:
        found = [max(self.bounded(bound, seed)) for seed in range(runs)]
        assert max(found) == bound

    @pytest.mark.parametrize("runs", [1, pytest.param(200, marks=pytest.mark.soak)])
    def test_in_lockstep_nobody_is_ahead(self, runs: int) -> None:
        """By one at most, as seen from here: who has ended a turn has not begun the next."""
        assert max(max(self.bounded(0, seed)) for seed in range(runs)) <= 1

    def test_a_worker_that_never_comes_is_named(self) -> None:
        def body(run: Run) -> str:
            run._context.deadline = 0.5
            model, optimizer, loader = table(run)
            try:
                for ids in loader:
                    if run.rank == 1:
                        time.sleep(2)
                        break
                    turn(model, optimizer, ids)
            except DeadlineExceeded as error:
                assert error.missing == (1,)
                return str(error)
            return ""

        said: list[str] = []
        workers(2, lambda run: said.append(body(run)), strategy=SSP)
        text = next(text for text in said if text)
        assert "rank 0 waited 0.5 s in vain for rank 1, which has completed 0 turns" in text


def test_a_schedule_that_a_quick_worker_has_ended_stays_there() -> None:
    """It has more turns than the epoch has batches for each."""

    def body(run: Run) -> tuple[int, int, float]:
        model, optimizer, loader = table(run, 60, 6)
        schedule = run.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10))
        turns = 0
        for ids in loader:
            time.sleep(0.03 if run.rank else 0.001)
            turn(model, optimizer, ids)
            schedule.step()
            turns += 1
        return turns, schedule.last_epoch, schedule.get_last_lr()[0]

    (quick, ended, rate), (slow, mine, _) = workers(2, body, strategy=ASP)
    assert quick > 10 and ended == 9 and rate < 1e-4 and slow == mine < 10


class TestStepsTogether:
    """Within a bound: who is on time makes a step, who is late is in the next, and nothing is lost."""

    def losses(self, strategy: ParameterServer, size: int, *, pauses: Callable[[int, int], float] = lambda rank, turn: 0.0) -> Any:
        """The parameters in the end of a run with momentum, clipping and a schedule, and the facts of the first server."""

        def body(run: Run) -> tuple[Tensor, Any]:
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
            for number, parameter in enumerate(model.parameters()):
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            data = TensorDataset(torch.randn(66, 4, generator=torch.Generator().manual_seed(3)).double())
            model, optimizer, schedule, loader = run.prepare(model, optimizer, schedule, DataLoader(data, 12))
            for _ in run.epochs(2):
                for count, (x,) in enumerate(loader):
                    time.sleep(pauses(run.rank, count))
                    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                    run.clip(model, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                schedule.step()
            run.barrier()
            return parameters(model), [*run._loop.backward.sync.facts(), {}][0]  # type: ignore[attr-defined]

        return workers(size, body, strategy=strategy)[0]

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_where_nobody_is_late_it_is_lockstep(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same weights as one worker alone has, with momentum, clipped, with a schedule: whoever is dealt which samples of a batch."""
        monkeypatch.setattr("paceline.server.stragglers.LEAST", 1e9)
        monkeypatch.setattr("paceline.server.stragglers.MOST", 1e9)
        found, facts = self.losses(ParameterServer(2, 3), size)
        expected, _ = self.losses(ParameterServer(2), 1)
        assert (found - expected).norm() <= 1e-9 * expected.norm()
        if size > 1:  # the last batch of 6 has work for fewer of them, half of 12 being for one or two
            assert facts["steps_by_workers"] == {str(size): 10, str(size - 1): 2} and set(facts["steps_late"]) == {"0"}

    def test_each_gradient_is_in_one_step(self) -> None:
        """Also the late ones, also at the end of an epoch, when the slow one comes last of all; with momentum 0 each moves its weight."""
        for seed in range(2):
            chance = [random.Random(3 * seed + rank) for rank in range(3)]
            found = epoch(SSP, 3, slow=lambda rank, chance=chance: chance[rank].choice([0.0, 0.0, 0.0, 0.02]), epochs=2)
            assert sorted(chain(*(ids for ids, _, _ in found))) == sorted([*range(60)] * 2)
            assert all(torch.allclose(weights, torch.full((60,), -2 / 6, dtype=torch.float64), rtol=1e-12) for _, weights, _ in found)

    @pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
    def test_late_gradients_are_seen_and_train_as_well(self, seed: int) -> None:
        chance = random.Random(seed)
        pauses = [[0.05 if chance.random() < 0.15 else 0.005 for _ in range(99)] for _ in range(3)]
        found, facts = self.losses(ParameterServer(2, 3), 3, pauses=lambda rank, turn: pauses[rank][turn])
        assert sum(facts["steps_late"].values()) > facts["steps_late"]["0"] > 0 and len(facts["steps_by_workers"]) > 1
        assert bool(found.isfinite().all())

    def test_the_slowest_holds_those_who_used_up_the_bound(self) -> None:
        """Nobody takes many more turns than the slow one."""
        found = epoch(ParameterServer(1, 2), 3, count=90, slow=lambda rank: 0.05 if rank == 2 else 0.001)
        assert all(8 <= len(ids) / 2 <= 19 for ids, _, _ in found)

    def test_two_optimizers(self) -> None:
        """They step by themselves; who waits at one isn't waited for at the other, and every other turn has one alone."""
        chance = [random.Random(rank) for rank in range(3)]

        def body(run: Run) -> tuple[Tensor, int]:
            first, second = Table(60), Table(60)
            one, two = torch.optim.SGD(first.parameters(), 1.0), torch.optim.SGD(second.parameters(), 0.5)
            loader = DataLoader(Numbers(60), 6)
            first, second, one, two, loader = run.prepare(first, second, one, two, loader)
            for count, ids in enumerate(loader):
                time.sleep(chance[run.rank].choice([0.0, 0.0, 0.02]))
                (first(ids) + second(ids) if count % 2 else first(ids)).backward()
                one.step()
                if count % 2:
                    two.step()
                one.zero_grad()
                two.zero_grad()
            run.barrier()
            return parameters(first), int((parameters(second) != 0).sum())

        found = workers(3, body, strategy=SSP)
        assert all(torch.allclose(weights, torch.full((60,), -1 / 6, dtype=torch.float64)) for weights, _ in found)
        assert {count for _, count in found} == {found[0][1]} and 20 <= found[0][1] <= 40


class TestBackupWorkers:
    def test_who_comes_late_is_dropped_and_told(self, tmp_path: Path) -> None:
        def body(run: Run) -> tuple[Tensor, list[list[int]]]:
            model, optimizer, loader = table(run, count=90, batch=9)
            mine = []
            for ids in loader:
                time.sleep(0.05 if run.rank == 2 else 0.005)
                mine.append(ids.tolist())
                turn(model, optimizer, ids)
            run.barrier()
            return parameters(model), mine

        found = workers(3, body, strategy=BACKUP, folder=tmp_path)
        summary = json.loads(next(tmp_path.rglob("summary.json")).read_text())
        dropped = summary["servers"][0]["dropped"]
        assert dropped["gradients"] == len(dropped["pieces"]) > 0 and dropped["samples"] == 3 * dropped["gradients"]
        weights = found[0][0]
        assert int((weights == 0).sum()) == dropped["samples"]
        trained = [ids for _, mine in found for ids in mine]
        kept = [ids for ids in trained if bool((weights[torch.tensor(ids)] != 0).all())]
        assert len(trained) - len(kept) == dropped["gradients"]
        assert all(torch.equal(weights, other) for other, _ in found)

    @pytest.mark.parametrize("clip", [False, True])
    def test_dealt_again_with_two_optimizers(self, clip: bool) -> None:
        """Who is late for the first isn't in a step of the second: dealt again, it would be there twice. And there is an end: of two
        workers who were each late for another optimizer, each could make the other late for ever."""
        chance = random.Random(5)

        def body(run: Run) -> tuple[Tensor, Tensor]:
            models = Table(60), Table(60)
            optimizers = [torch.optim.SGD(model.parameters(), 1.0) for model in models]
            first, second, one, two, loader = run.prepare(*models, *optimizers, DataLoader(Numbers(60), 6))
            for ids in loader:
                time.sleep(chance.random() * 0.01)
                (first(ids) + second(ids)).backward()
                if clip:
                    run.clip([*first.parameters(), *second.parameters()], 1e6)
                one.step()
                time.sleep(chance.random() * 0.01)
                two.step()
                one.zero_grad()
                two.zero_grad()
            run.barrier()
            return parameters(first), parameters(second)

        single = [-6 / parts / 6 for parts in (2, 4, 6)]  # a share in a step of one worker, of two, of three
        for first, second in workers(3, body, strategy=REQUEUE):
            assert all(any(math.isclose(weight, one) for one in single) for weight in first.tolist())
            assert all(any(math.isclose(weight, one) for one in (0.0, *single)) for weight in second.tolist())

    @pytest.mark.parametrize("clip", [None, 0.5])
    def test_a_step_is_the_mean_of_who_made_it(self, clip: float | None) -> None:
        """Gradients are 1 everywhere: each step moves by the learning rate, whoever is in it."""
        by = 0.5 * (clip or 1.0)

        def body(run: Run) -> tuple[float, int]:
            model = nn.Linear(1, 1, bias=False).double()
            nn.init.zeros_(model.weight)
            ready, optimizer, loader = run.prepare(
                model, torch.optim.SGD(model.parameters(), 0.5), DataLoader(Numbers(50), 10), shares=[5, 3, 2]
            )
            seen = []
            for ids in loader:
                time.sleep(0.02 if run.rank == 1 else 0.0)
                ready(torch.ones(len(ids), 1).double()).mean().backward()
                if clip is not None:
                    assert float(run.clip(ready, clip)) == pytest.approx(1.0)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(float(ready.weight.detach()))
            assert all(value / by == pytest.approx(round(value / by), abs=1e-4) for value in seen) and seen == sorted(seen, reverse=True)
            run.barrier()
            return float(ready.weight.detach()), run.steps

        found = workers(3, body, strategy=BACKUP)
        assert found[0] == found[1] == found[2] and found[0][0] <= -4 * by

    def test_dealt_again_every_sample_is_in_a_step_once(self) -> None:
        """A step has 2 of 3 shares of 3, so that each sample in it moves by 1/6: but at the end of an epoch, where one is enough."""
        found = epoch(REQUEUE, count=90, batch=9, slow=lambda rank: 0.03 if rank == 2 else 0.003)
        weights = found[0][1]
        assert sum(len(ids) for ids, _, _ in found) > 90
        near = [(weights + part).abs() < 1e-9 for part in (1 / 9, 1 / 6, 1 / 3)]
        assert bool((near[0] | near[1] | near[2]).all()) and int(near[1].sum()) > 60

    def test_quick_ones_do_not_wait(self) -> None:
        began = time.perf_counter()
        found = epoch(BACKUP, count=60, batch=6, slow=lambda rank: 0.5 if rank == 0 else 0.0)
        assert len(found[0][0]) <= 8 and time.perf_counter() - began < 5


@EACH
class TestTheRestOfARun:
    def test_losses_are_logged_and_samples_are_counted(self, strategy: ParameterServer, tmp_path: Path) -> None:
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
        dropped = summary["servers"][0]["dropped"]
        assert summary["samples"] == 120 + dropped["dealt_again"] and summary["final_loss"] == 3.0
        assert sum(summary["servers"][0]["staleness"].values()) > 0 and summary["servers"][1]["bytes"] > 0
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert sum(line["samples"] for line in lines) == summary["samples"] and len(lines) == summary["steps"]
        assert {line["loss"] for line in lines} == {3.0} and [line["step"] for line in lines] == sorted(line["step"] for line in lines)

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
        assert {steps for steps, _, _ in found} == {10} and all(torch.equal(found[0][2], weights) for _, _, weights in found)

    def test_stopping_early(self, strategy: ParameterServer) -> None:
        def body(run: Run) -> int:
            model, optimizer, loader = table(run, count=6000)
            turns = 0
            for _ in run.epochs(5):
                for ids in loader:
                    if run.rank == 1 and turns == 3:
                        run.stop()
                    turn(model, optimizer, ids)
                    run._meetings.next = 0  # hand over in each step
                    turns += 1
            return turns

        assert all(turns < 1500 for turns in workers(3, body, strategy=strategy))

    def test_saved_between_epochs_and_resumed(self, strategy: ParameterServer, tmp_path: Path) -> None:
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
            assert torch.allclose(first[0], torch.full((60,), -1 / 6, dtype=torch.float64)) and torch.allclose(second[0], 2 * first[0])

    def test_calls_of_all_inside_the_loop(self, strategy: ParameterServer) -> None:
        for call in (lambda run: run.mean(1.0), lambda run: run.barrier(), lambda run: run.save()):

            def body(run: Run, call: Any = call) -> None:
                model, optimizer, loader = table(run)
                for ids in loader:
                    turn(model, optimizer, ids)
                    with pytest.raises(UsageError, match="are not in lockstep inside the loop over a training loader"):
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
        assert sorted(mine) == [*range(60)] and steps == 10 and torch.allclose(weights, torch.full((60,), -1 / 6, dtype=torch.float64))


def test_clipped_by_its_own_norm() -> None:
    def body(run: Run) -> float:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        ready, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 1.0), DataLoader(Numbers(20), 4))
        for ids in loader:
            (8 * ready(torch.ones(len(ids), 1).double()).mean()).backward()
            assert float(run.clip(ready, 0.5)) == pytest.approx(8.0)
            optimizer.step()
            optimizer.zero_grad()
        run.barrier()
        return float(ready.weight.detach())

    assert workers(2, body, strategy=SSP)[0] == pytest.approx(-5 * 0.5, rel=1e-6)


def test_schedules_go_with_each_worker() -> None:
    def body(run: Run) -> Tensor:
        model = Table(20)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, DataLoader(Numbers(20), 4))
        for _ in run.epochs(3):
            for ids in loader:
                turn(model, optimizer, ids)
            scheduler.step()
        return parameters(model)

    assert torch.allclose(workers(2, body, strategy=ASP)[0], torch.full((20,), -1.75 / 4, dtype=torch.float64))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


REFUSED: dict[str, tuple[Callable[[Run], Any], str]] = {
    "weights": (lambda run: table(run, weigh=len), "weigh= has all workers add up"),
    "a stream": (lambda run: run.prepare(nn.Linear(1, 1), DataLoader(Stream(), 2)), "a stream .* is dealt step by step"),
    "BatchNorm": (lambda run: run.prepare(nn.BatchNorm1d(2)), "BatchNorm layers, whose statistics are those of all"),
    "no share": (lambda run: next(iter(table(run, shares=[1, 0])[2])), "a worker that takes 0 samples never trains"),
    "whole batches": (
        lambda run: next(iter(run.prepare(nn.Linear(1, 1), DataLoader(Numbers(4), batch_size=None))[1])),
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


def test_a_step_without_a_loader_is_refused() -> None:
    def body(run: Run) -> None:
        model = nn.Linear(1, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        model(torch.ones(1)).backward()
        with pytest.raises(UsageError, match="prepare the loader too"):
            optimizer.step()

    workers(2, body, strategy=SSP)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"staleness": -1}, "is no bound"),
        ({"staleness": 1.5}, "is no bound"),
        ({"staleness": math.nan}, "is no bound"),
        ({"backup_workers": -1}, "is no number of workers"),
        ({"staleness": 1, "backup_workers": 1}, "leave out staleness, or backup_workers"),
        ({"requeue": True}, "give backup_workers=1 or more"),
    ],
)
def test_what_can_not_be_asked_for(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ParameterServer(**options)
