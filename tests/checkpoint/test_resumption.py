"""A job that starts again goes on in the run of its first start, on threads;
tests/cluster/launcher/test_restarts.py kills processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.cluster.discover import JobStart
from paceline.session.run import Run
from tests.harness.runs import batches, parameters, workers

FIRST = JobStart()


def again(folder: Path) -> JobStart:
    return JobStart(
        str(folder / "test"), 1, time.time() - 100, ((time.time(), "rank 1 was killed"),)
    )


def training(
    *,
    until: int = 15,
    saves: int | None = 3,
    resume: Callable[[Run], Any] = lambda run: None,
    epochs: bool = True,
) -> Callable[[Run], Tensor]:
    """Three epochs of five steps, which end at step `until` as if all workers were lost, with a
    checkpoint at step `saves`.
    """

    def body(run: Run) -> Tensor:
        model = nn.Linear(6, 2, dtype=torch.float64)
        # threads share torch's generator, so nothing is drawn from it
        for parameter in model.parameters():
            parameter.data = torch.linspace(
                -0.5, 0.5, parameter.numel(), dtype=torch.float64
            ).reshape(parameter.shape)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model, optimizer, loader = run.prepare(model, optimizer, batches())
        resume(run)
        for _ in run.epochs(3) if epochs else range(3):
            for x, y in loader:
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
                if run.steps + 1 == saves:
                    run.save()
                if run.steps + 1 == until:
                    return parameters(model)
        return parameters(model)

    return body


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [
        json.loads(line) for line in (folder / "test" / "metrics.jsonl").read_text().splitlines()
    ]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("resume", "epochs"),
    [
        (lambda run: None, True),
        (lambda run: run.resume(), True),
        (lambda run: run.resume("elsewhere"), True),
        (lambda run: None, False),
    ],
    ids=["by itself", "resume", "resume another run", "a loop of its own begins anew"],
)
@pytest.mark.parametrize("saves", [3, 5])  # inside of an epoch, and where one ends
def test_it_goes_on_as_if_nothing_had_been(
    tmp_path: Path, resume: Callable[[Run], Any], saves: int, *, epochs: bool
) -> None:
    wanted = workers(2, training(saves=None), folder=tmp_path / "undisturbed")
    workers(2, training(until=7, saves=saves), folder=tmp_path, start=FIRST)
    said: list[str] = []
    found = workers(
        2,
        training(saves=None, resume=resume, epochs=epochs),
        folder=tmp_path,
        start=again(tmp_path),
        said=said,
    )
    assert all(map(torch.equal, found, wanted))
    assert losses(tmp_path) == losses(tmp_path / "undisturbed")
    begun_anew = [
        text for text in said if "trains from the beginning although it has checkpoints" in text
    ]
    resumed = [
        text for text in said if text.endswith(f"at step {saves}") and "resumed from" in text
    ]
    assert (len(begun_anew), len(resumed)) == ((0, 1) if epochs else (1, 0)), said
    assert not (tmp_path / "test-2").exists()


def test_nothing_saved_is_said_after_an_epoch(tmp_path: Path) -> None:
    said: list[str] = []
    wanted = workers(2, training(saves=None), folder=tmp_path, start=FIRST, said=said)
    assert [text for text in said if "no checkpoint is saved" in text] == [
        (
            "an epoch is over and no checkpoint is saved: --restarts would begin anew; "
            "call run.save now and then"
        )
    ]
    said.clear()
    assert all(
        map(
            torch.equal,
            workers(2, training(saves=None), folder=tmp_path, start=again(tmp_path)),
            wanted,
        )
    )
    for name, saves, start in (("saved", 3, FIRST), ("no restarts", None, None)):
        workers(2, training(saves=saves), folder=tmp_path / name, start=start, said=said)
    assert not [text for text in said if "no checkpoint is saved" in text]


def test_without_restarts_a_run_has_its_own_folder_and_begins_anew(tmp_path: Path) -> None:
    workers(2, training(until=7), folder=tmp_path)
    wanted = workers(2, training(saves=None), folder=tmp_path / "undisturbed")
    assert all(map(torch.equal, workers(2, training(saves=None), folder=tmp_path), wanted))
    assert (tmp_path / "test-2" / "metrics.jsonl").exists()


def with_a_learned_loss(run: Run, *, resumes: bool = False, until: int = 15) -> Tensor:
    """Three epochs with a loss whose weight the optimizer has, and no model; a checkpoint at
    step 3.
    """
    model, weight = (
        nn.Linear(6, 2, dtype=torch.float64),
        nn.Parameter(torch.ones((), dtype=torch.float64)),
    )
    for parameter in model.parameters():
        parameter.data = torch.linspace(-0.5, 0.5, parameter.numel(), dtype=torch.float64).reshape(
            parameter.shape
        )
    optimizer = torch.optim.SGD([*model.parameters(), weight], 0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, batches())
    if resumes:
        run.resume()
    for _ in run.epochs(3):
        for x, y in loader:
            ((model(x) * weight - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.steps + 1 == 3:
                run.save()
            if run.steps + 1 == until:
                break
        if run.steps + 1 >= until:
            break
    return torch.cat([parameters(model), weight.detach().view(1)])


def test_parameters_of_no_model_go_on_where_they_were(tmp_path: Path) -> None:
    wanted = workers(2, with_a_learned_loss)
    workers(2, lambda run: with_a_learned_loss(run, until=4), folder=tmp_path)
    found = workers(
        2,
        lambda run: with_a_learned_loss(run, resumes=True),
        folder=tmp_path,
        start=again(tmp_path),
    )
    assert all(map(torch.equal, found, wanted))


def in_two_loops(run: Run, saves: int, until: int) -> list[tuple[int, str, list[int]]]:
    """Two epochs, of two training loops with an evaluation in each turn of the first; a
    checkpoint within step `saves`.
    """
    model = nn.Linear(1, 1)
    data = [
        DataLoader(TensorDataset(torch.arange(start, start + 8.0)[:, None]), 4)
        for start in (0, 10, 20)
    ]
    model, optimizer, first, second, held_out = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.0), *data
    )
    run.resume()
    seen: list[tuple[int, str, list[int]]] = []

    def train(epoch: int, name: str, x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((epoch, name, run.gather(x).flatten().int().tolist()))
        if name == "second" and run.steps + 1 == saves:
            run.save()

    for epoch in run.epochs(2):
        for (x,) in first:
            train(epoch, "first", x)
            with torch.no_grad():
                for (held,) in held_out if run.steps % 2 else []:
                    seen.append((epoch, "held out", run.gather(held).flatten().int().tolist()))
                    if run.steps + 1 == saves:
                        run.save()
                    if run.steps + 1 == until:
                        return seen
        for (x,) in second:
            train(epoch, "second", x)
            if run.steps + 1 == until:
                return seen
    return seen


@pytest.mark.parametrize("step", [3, 4, 7])
def test_a_training_loop_that_was_over_in_the_epoch_is_not_run_again(
    tmp_path: Path, step: int
) -> None:
    wanted = workers(2, lambda run: in_two_loops(run, 0, 0))[0]
    done = workers(2, lambda run: in_two_loops(run, step, step), folder=tmp_path)[0]
    rest = workers(2, lambda run: in_two_loops(run, 0, 0), folder=tmp_path)[0]
    assert done + rest == wanted


def test_an_evaluation_is_whole_after_a_save_inside_of_one(tmp_path: Path) -> None:
    """Its loop is gone, and the next one is to see all samples."""
    workers(2, lambda run: in_two_loops(run, 2, 2), folder=tmp_path)
    found = workers(2, lambda run: in_two_loops(run, 0, 0), folder=tmp_path)[0]
    assert [rows for epoch, name, rows in found if name == "held out"] == [
        [20, 21, 22, 23],
        [24, 25, 26, 27],
    ]


def resume_by_option(folder: Path, said: list[str], **options: Any) -> Tensor:
    """The training, with `paceline run --resume`."""
    return workers(
        2, training(**options), folder=folder, said=said, place=lambda rank: {"resumes": True}
    )[0]


def test_the_option_goes_on_from_an_earlier_run(tmp_path: Path) -> None:
    """The first time there is none."""
    said: list[str] = []
    resume_by_option(tmp_path, said, until=6)
    assert any("nothing to resume, training begins anew" in line for line in said)
    went_on = resume_by_option(tmp_path, said)
    assert any(
        line.startswith("resumed from")
        and line.endswith("/test/checkpoints/step-00000003 at step 3")
        for line in said
    ), said
    torch.testing.assert_close(went_on, workers(2, training(saves=None))[0])


def test_the_option_needs_a_loop_over_epochs(tmp_path: Path) -> None:
    said: list[str] = []
    resume_by_option(tmp_path, said, until=6, epochs=False)
    assert any(line.startswith("--resume has no effect") for line in said)
    said.clear()
    resume_by_option(tmp_path, said, epochs=False, resume=lambda run: run.resume())
    assert not any(line.startswith("--resume has no effect") for line in said)
