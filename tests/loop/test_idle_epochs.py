"""Evaluations with `no_grad` inside of the loop: noticed, said, and no steps; whatever trains is
none of them.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from paceline.session.run import Run
from tests.harness.runs import Numbered, distance, parameters, workers

FIRST = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


class Passing(IterableDataset[Any]):
    """Some samples of `Numbered`, as a stream."""

    def __iter__(self) -> Any:
        data = Numbered(19)
        return (data[index] for index in range(7))


def prepared(run: Run, test: Any = None, **options: Any) -> Any:
    model = copy.deepcopy(FIRST)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(Numbered(19), 6), DataLoader(Numbered(7), 3) if test is None else test
    return run.prepare(model, optimizer, *data, **options)


def train(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def evaluate(model: nn.Module, loader: Any) -> tuple[Tensor, int]:
    """The sum of losses over my samples, and how many there were."""
    total, count = torch.zeros(1, dtype=torch.float64), 0
    for x, y in loader:
        with torch.no_grad():
            total += F.mse_loss(model(x), y, reduction="sum")
            count += len(x)
    return total, count


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("stream", [False, True])
def test_samples_of_such_an_evaluation_count_once(mode: str, stream: bool, tmp_path: Path) -> None:
    said: list[str] = []

    def body(run: Run) -> list[Any]:
        model, optimizer, loader, test = prepared(run, DataLoader(Passing(), 3) if stream else None)
        found = []
        for _ in run.epochs(2):
            train(model, optimizer, loader)
            model.train(mode == "train")
            before = run.steps
            total, count = evaluate(model, test)
            assert run.steps == before == run._context.step_state.step
            found.append(
                (
                    run.group.all_reduce(total).wait().item(),
                    int(run.group.all_reduce(torch.tensor([count])).wait()),
                )
            )
            model.train()
        return [*found, run.steps]

    wanted = workers(1, body)[0]
    assert [count for _, count in wanted[:2]] == [7, 7] and wanted[2] == 8
    for size in (2, 3):
        said.clear()
        folder = tmp_path / str(size)
        for found in workers(size, body, said=said, folder=folder):
            assert found[2] == 8
            assert [each for pair in found[:2] for each in pair] == pytest.approx(
                [each for pair in wanted[:2] for each in pair], rel=1e-12
            )
        assert sum("had no backward" in text and "train=False" in text for text in said) == 1
        (summary,) = folder.rglob("summary.json")
        assert json.loads(summary.read_text())["steps"] == 8
        lines = [
            json.loads(line) for line in (summary.parent / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line["step"] for line in lines if "samples" in line] == list(range(1, 9))


Loop = Callable[[Run, Any, Any, Any, Any], None]


def warming_up(run: Run, model: Any, optimizer: Any, loader: Any, test: Any) -> None:
    for number, (x, y) in enumerate(loader):
        run.log(number=float(number))
        if run.steps < 2:
            continue
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def in_eval_mode(run: Run, model: Any, optimizer: Any, loader: Any, test: Any) -> None:
    model.eval()
    train(model, optimizer, test)
    train(model, optimizer, loader)


def looked_at_before(run: Run, model: Any, optimizer: Any, loader: Any, test: Any) -> None:
    sizes = [len(x) for x, _ in test]
    assert run.steps == 0 and len(sizes) == 3
    train(model, optimizer, test)
    train(model, optimizer, test)


def by_hand(run: Run, model: Any, optimizer: Any, loader: Any, test: Any) -> None:
    for _ in loader:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()


def without_an_optimizer(run: Run, model: Any, optimizer: Any, loader: Any, test: Any) -> None:
    for _ in loader:
        with torch.no_grad():
            for p in model.parameters():
                p.data += 0.1


def added_up(run: Run, model: Any, optimizer: Any, loader: Any, test: Any) -> None:
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
    optimizer.step()


def added_up_silently(run: Run, model: Any, optimizer: Any, loader: Any, test: Any) -> None:
    with run.no_sync():
        for x, y in loader:
            F.mse_loss(model(x), y).backward()


def left_early(run: Run, model: Any, optimizer: Any, loader: Any, test: Any) -> None:
    next(iter(loader))
    for number, _ in enumerate(loader):
        if number == 1:
            break
    train(model, optimizer, loader)


def inside_a_turn(run: Run, model: Any, optimizer: Any, loader: Any, test: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        evaluate(model, test)


TRAINING = {
    warming_up: 4,
    in_eval_mode: 7,
    looked_at_before: 6,
    by_hand: 4,
    without_an_optimizer: 4,
    added_up: 4,
    added_up_silently: 4,
    left_early: 7,
    inside_a_turn: 4,
}


@pytest.mark.parametrize("loop", TRAINING)
def test_what_trains_takes_steps(loop: Loop, tmp_path: Path) -> None:
    def body(run: Run) -> tuple[Tensor, int]:
        model, optimizer, loader, test = prepared(run)
        loop(run, model, optimizer, loader, test)
        return parameters(model), run.steps

    wanted = workers(1, body)[0]
    assert wanted[1] == TRAINING[loop]
    for size in (2, 3):
        folder = tmp_path / str(size)
        for found in workers(size, body, folder=folder):
            assert distance(found[0], wanted[0]) < 1e-12 and found[1] == wanted[1]
        (metrics,) = folder.rglob("metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [line["step"] for line in lines if "samples" in line] == list(
            range(1, wanted[1] + 1)
        )
        if loop is warming_up:
            assert {line["step"]: line["number"] for line in lines if "number" in line} == {
                1: 0.0,
                2: 1.0,
                3: 2.0,
                4: 3.0,
            }


def test_a_pass_without_exchange_may_be_left_out_by_a_worker() -> None:
    """What one of them has seen alone doesn't let it make calls of all that the others don't
    make.
    """

    def body(run: Run) -> tuple[Tensor, int]:
        model, optimizer, loader, _ = prepared(run)
        for number, (x, y) in enumerate(loader):
            with run.no_sync() if number % 2 == 0 else contextlib.nullcontext():
                if number or not run.rank:
                    F.mse_loss(model(x), y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return parameters(model), run.steps

    one, other = workers(2, body)
    assert torch.equal(one[0], other[0]) and one[1] == other[1] == 4


def test_an_epoch_that_is_resumed_at_its_end_is_no_evaluation(tmp_path: Path) -> None:
    said: list[str] = []

    def body(run: Run, *, save: bool) -> int:
        model, optimizer, loader, _ = prepared(run)
        assert save or run.resume(tmp_path / "test")
        for _ in run.epochs(2):
            for number, (x, y) in enumerate(loader):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                if save and number == 3:
                    run.save()
                    return run.steps
            assert not loader.terms.last_epoch_idle
        return run.steps

    workers(2, lambda run: body(run, save=True), folder=tmp_path)
    assert workers(2, lambda run: body(run, save=False), folder=tmp_path, said=said) == [8, 8]
    assert any("at step 4" in text for text in said) and not any(
        "had no backward" in text for text in said
    )


def test_where_losses_are_survived_nothing_is_followed() -> None:
    """Who joins in the middle of an epoch would be alone at its end in asking whether anything
    was trained.
    """

    def body(run: Run) -> int:
        model, _, _, test = prepared(run)
        run._loop.transaction.recovers = True
        evaluate(model, test)
        return run.steps

    said: list[str] = []
    assert workers(2, body, said=said) == [3, 3] and not any(
        "had no backward" in text for text in said
    )


def test_what_the_script_says_itself_holds() -> None:
    said: list[str] = []

    def body(run: Run) -> int:
        model, _, _, test = prepared(run, train=True)
        evaluate(model, test)
        return run.steps

    assert workers(2, body, said=said) == [3, 3] and not any(
        "had no backward" in text for text in said
    )


def test_what_was_logged_in_such_an_evaluation_is_of_the_step_before(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model, optimizer, loader, test = prepared(run)
        train(model, optimizer, loader)
        for x, _ in test:
            with torch.no_grad():
                run.log(rows=float(len(x)))
        train(model, optimizer, loader)

    workers(2, body, folder=tmp_path)
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if "rows" in line] == [4]
