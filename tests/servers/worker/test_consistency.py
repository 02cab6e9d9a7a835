"""Workers that are not in lockstep, in whole runs on threads: which gradients make a step, and
how far a worker goes ahead.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness.jobs import PATIENCE, wait_for
from tests.harness.parameter_servers import BACKUP, SSP, Numbers, Table, epoch, table, turn
from tests.harness.runs import parameters, workers


class TestTheBound:
    def bounded(self, bound: int, seed: int, size: int = 3) -> list[int]:
        """How far each turn of each worker began ahead of the slowest; what it had to have of
        the others, it had.
        """
        chance = [random.Random(100 * seed + rank) for rank in range(size)]
        done, left, leads = [0] * size, [False] * size, list[int]()

        def body(run: Run) -> None:
            me, of = run.rank, 1 / size
            model = nn.Linear(1, 1, bias=False).double()
            nn.init.zeros_(model.weight)
            loader = DataLoader(Numbers(size * 24), size)
            ready, optimizer, loader = run.prepare(
                model, torch.optim.SGD(model.parameters(), 1.0), loader
            )
            run.barrier()
            for ids in loader:
                others = [done[rank] for rank in range(size) if rank != me and not left[rank]]
                leads.append(done[me] - min([*others, done[me]]))
                # gradients are 1, so this counts what is in the parameters
                sent = -float(model.weight.detach()) / of
                # who is late goes on before its gradient is in a step
                mine = done[me] - min(bound, 1)
                least = max(mine, 0) + sum(
                    max(done[me] - bound, 0)
                    for rank in range(size)
                    if rank != me and not left[rank]
                )
                assert sent > least - 1e-6, (
                    f"worker {me} at {done[me]} has {sent:g} gradients, and should have {least}"
                )
                assert bound or abs(sent - size * done[me]) < 1e-9, (
                    f"worker {me} at {done[me]} has {sent:g} gradients in lockstep"
                )
                # so that the bound is reached in one run at least
                stalls = seed == me == 0 < bound and done[me] == 8
                if stalls:
                    wait_for(lambda: max(leads) >= bound)
                time.sleep(chance[me].choice([0.0, 0.0, 0.0, 0.01]))
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


class TestStepsTogether:
    """Within a bound: who is on time makes a step, who is late is in the next, and nothing is
    lost.
    """

    def losses(
        self,
        strategy: ParameterServer,
        size: int,
        *,
        late: Callable[[int, int], bool] = lambda rank, turn: False,
    ) -> Any:
        """The parameters in the end of a run with momentum, clipping and a schedule, and the facts
        of the first server.

        A worker that is `late` in a turn of an epoch ends it after another has ended its own.
        """
        done = [[0] * size for _ in range(2)]  # of each epoch, as servers count

        def body(run: Run) -> tuple[Tensor, Any]:
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
            for number, parameter in enumerate(model.parameters()):
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            data = TensorDataset(
                torch.randn(66, 4, generator=torch.Generator().manual_seed(3)).double()
            )
            model, optimizer, schedule, loader = run.prepare(
                model, optimizer, schedule, DataLoader(data, 12)
            )
            for number in run.epochs(2):
                for count, (x,) in enumerate(loader):
                    if late(run.rank, count):
                        wait_for(lambda turns=done[number]: max(turns) > turns[run.rank])
                    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                    run.clip(model, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    done[number][run.rank] += 1
                schedule.step()
            run.barrier()
            return parameters(model), [*run._loop.backward.sync.facts(), {}][0]  # type: ignore[attr-defined]

        return workers(size, body, strategy=strategy)[0]

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_where_nobody_is_late_it_is_lockstep(
        self, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same weights as one worker alone has, with momentum, clipped, with a schedule:
        whoever is dealt which samples of a batch.
        """
        monkeypatch.setattr("paceline.servers.process.late_gradients.MIN_MARGIN", 1e9)
        monkeypatch.setattr("paceline.servers.process.late_gradients.MAX_MARGIN", 1e9)
        found, facts = self.losses(ParameterServer(2, 3), size)
        expected, _ = self.losses(ParameterServer(2), 1)
        assert (found - expected).norm() <= 1e-9 * expected.norm()
        # the last batch of 6 has work for fewer of them, half of 12 being for one or two
        if size > 1:
            assert facts["steps_by_workers"] == {str(size): 10, str(size - 1): 2} and set(
                facts["steps_late"]
            ) == {"0"}

    def test_each_gradient_is_in_one_step(self) -> None:
        """Also the late ones, also at the end of an epoch, when the slow one comes last of all;
        with momentum 0 each moves its weight.
        """
        for seed in range(2):
            chance = [random.Random(3 * seed + rank) for rank in range(3)]
            found = epoch(
                SSP,
                3,
                slow=lambda rank, chance=chance: chance[rank].choice([0.0, 0.0, 0.0, 0.02]),
                epochs=2,
            )
            assert sorted(chain(*(ids for ids, _, _ in found))) == sorted([*range(60)] * 2)
            assert all(
                torch.allclose(weights, torch.full((60,), -2 / 6, dtype=torch.float64), rtol=1e-12)
                for _, weights, _ in found
            )

    def test_late_gradients_are_seen_and_train_as_well(self) -> None:
        """Each of the workers is late in one turn of an epoch, and the others never in the same."""
        found, facts = self.losses(
            ParameterServer(2, 3), 3, late=lambda rank, turn: turn == 2 + rank
        )
        assert (
            sum(facts["steps_late"].values()) > facts["steps_late"]["0"] > 0
            and len(facts["steps_by_workers"]) > 1
        )
        assert bool(found.isfinite().all())

    def test_the_slowest_holds_those_who_used_up_the_bound(self) -> None:
        """Nobody takes many more turns than the slow one."""
        found = epoch(
            ParameterServer(1, 2), 3, count=90, slow=lambda rank: 0.05 if rank == 2 else 0.001
        )
        assert all(8 <= len(ids) / 2 <= 19 for ids, _, _ in found)

    def test_two_optimizers(self) -> None:
        """They step by themselves; who waits at one isn't waited for at the other, and every
        other turn has one alone.
        """
        chance = [random.Random(rank) for rank in range(3)]

        def body(run: Run) -> tuple[Tensor, int]:
            first, second = Table(60), Table(60)
            one, two = (
                torch.optim.SGD(first.parameters(), 1.0),
                torch.optim.SGD(second.parameters(), 0.5),
            )
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
        assert all(
            torch.allclose(weights, torch.full((60,), -1 / 6, dtype=torch.float64))
            for weights, _ in found
        )
        assert {count for _, count in found} == {found[0][1]} and 20 <= found[0][1] <= 40


class TestBackupWorkers:
    def test_who_comes_late_is_dropped_and_told(self, tmp_path: Path) -> None:
        begun = threading.Barrier(3)

        def body(run: Run) -> tuple[Tensor, list[list[int]]]:
            model, optimizer, loader = table(run, count=90, batch=9)
            mine = []
            for ids in loader:
                if not mine:  # the third to come is late for the first step
                    begun.wait(PATIENCE)
                mine.append(ids.tolist())
                turn(model, optimizer, ids)
            run.barrier()
            return parameters(model), mine

        found = workers(3, body, strategy=BACKUP, folder=tmp_path)
        summary = json.loads(next(tmp_path.rglob("summary.json")).read_text())
        dropped = summary["servers"][0]["dropped"]
        assert (
            dropped["gradients"] == len(dropped["pieces"]) > 0
            and dropped["samples"] == 3 * dropped["gradients"]
        )
        weights = found[0][0]
        assert int((weights == 0).sum()) == dropped["samples"]
        trained = [ids for _, mine in found for ids in mine]
        kept = [ids for ids in trained if bool((weights[torch.tensor(ids)] != 0).all())]
        assert len(trained) - len(kept) == dropped["gradients"]
        assert all(torch.equal(weights, other) for other, _ in found)

    @pytest.mark.parametrize("clip", [None, 0.5])
    def test_a_step_is_the_mean_of_who_made_it(self, clip: float | None) -> None:
        """Gradients are 1 everywhere: each step moves by the learning rate, whoever is in it."""
        by = 0.5 * (clip or 1.0)

        def body(run: Run) -> tuple[float, int]:
            model = nn.Linear(1, 1, bias=False).double()
            nn.init.zeros_(model.weight)
            ready, optimizer, loader = run.prepare(
                model,
                torch.optim.SGD(model.parameters(), 0.5),
                DataLoader(Numbers(50), 10),
                shares=[5, 3, 2],
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
            assert all(
                value / by == pytest.approx(round(value / by), abs=1e-4) for value in seen
            ) and seen == sorted(seen, reverse=True)
            run.barrier()
            return float(ready.weight.detach()), run.steps

        found = workers(3, body, strategy=BACKUP)
        assert found[0] == found[1] == found[2] and found[0][0] <= -4 * by

    def test_quick_ones_do_not_wait(self) -> None:
        turns = Counter[int]()

        def slow(rank: int) -> float:
            turns[rank] += 1
            # is in its first turn while the others take nearly all steps of the epoch
            if rank == 0:
                wait_for(lambda: min(turns[1], turns[2]) >= 12)
            return 0.0

        found = epoch(BACKUP, count=60, batch=6, slow=slow)
        # the others have had 48 of 60 by then; it would have 20, had they waited
        assert len(found[0][0]) <= 12
