"""Everything that a script can do with its run."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.checkpoint.files import checkpoint
from paceline.errors import (
    CheckpointError,
    Mismatch,
    PacelineError,
    ResourceError,
    UsageError,
    ViewChanged,
    WorkerLost,
)
from paceline.record.folder import RunFolder
from paceline.record.writer import MetricsWriter
from paceline.session.run import Run
from paceline.state.snapshot import make_snapshot
from tests.harness.models import net
from tests.harness.runs import Numbered, alone, batches, distance, parameters, workers

SHARES = [(2, None), (2, [1, 7]), (2, [0, 8]), (3, [3, 3, 2])]


def ready(run: Run, loader: Any = None, **options: Any) -> Any:
    model = net()
    return run.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loader or batches(),
        **options,
    )


def advance(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


# ---- who and where


def test_where_a_worker_is() -> None:
    def body(run: Run) -> tuple[Any, ...]:
        assert (
            run.host == "here"
            and run.device.type == "cpu"
            and run.group.size == run.size
            and run.group.rank == run.rank
        )
        return run.rank, run.size, run.local_rank, run.is_first, run.seed, run.steps, run.weight

    assert workers(3, body) == [
        (0, 3, 0, True, 1, 0, 1.0),
        (1, 3, 1, False, 1, 0, 1.0),
        (2, 3, 2, False, 1, 0, 1.0),
    ]


def noise(run: Run, count: int = 3) -> list[float]:
    return torch.randn(count, generator=run.generator).tolist()


def test_the_generator_draws_other_numbers_on_workers_with_other_samples() -> None:
    first, *others = workers(3, noise)
    assert first == workers(3, noise)[0] == alone(noise) and not set(first) & set(others[0]) | set(
        others[1]
    ) & set(first + others[0])
    one, two, three, four = workers(4, noise, mesh="data=2, tensor=2")
    assert one == two == first and three == four == others[0]


def test_the_generator_goes_on_where_a_worker_at_its_place_was(tmp_path: Path) -> None:
    def body(run: Run) -> list[float]:
        before = noise(run)
        if run.resume():
            return noise(run)
        run.save()
        return before + noise(run)

    whole = [drawn[3:] for drawn in workers(3, body, folder=tmp_path)]
    for size in (1, 2, 3):
        assert workers(size, body, folder=tmp_path) == whole[:size]
    begun, later = workers(4, noise), workers(4, body, folder=tmp_path)
    # it goes on where it is itself
    assert later[:3] == whole and later[3] not in (begun[3], *begun, *whole)


def test_the_generator_goes_on_in_another_mesh(tmp_path: Path) -> None:
    """Workers along `tensor` draw the same, whoever had their ranks."""

    def body(run: Run) -> list[float]:
        run.prepare(nn.Linear(6, 2))
        if not run.resume():
            noise(run)
            run.save()
        return noise(run)

    first, second = workers(2, body, folder=tmp_path)
    assert workers(2, body, folder=tmp_path, mesh="tensor=2") == [first] * 2 and first != second


def test_print_and_first(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[int] = []

    def body(run: Run) -> None:
        run.print("once", run.size, end="!\n")
        with run.first():
            if run.local_rank == 0:
                time.sleep(0.05)
            order.append(run.rank)
        run.barrier()

    workers(3, body)
    assert capsys.readouterr().out == "once 3!\n" and order[0] == 0 and sorted(order) == [0, 1, 2]


def test_a_barrier_waits_for_all() -> None:
    came: list[int] = []

    def body(run: Run) -> None:
        time.sleep(0.02 * run.rank)
        came.append(run.rank)
        run.barrier()
        assert len(came) == 3

    workers(3, body)


# ---- log


@pytest.mark.parametrize(("size", "shares"), SHARES)
def test_log_is_weighted_by_samples_and_leaves_ghosts_out(
    size: int, shares: Any, tmp_path: Path
) -> None:
    def body(run: Run, shares: Any) -> None:
        model, opt, loader = ready(run, batches(21, 8), shares=shares)
        for x, y in loader:
            loss = advance(model, opt, x, y)
            if run._loop.turn is not None and run._loop.turn.ghost:
                loss = torch.tensor(math.nan)
            run.log(loss=loss, rows=float(len(x)), large=y.max() * 0 + 3)

    workers(1, lambda run: body(run, None), folder=tmp_path / "one")
    workers(size, lambda run: body(run, shares), folder=tmp_path / "many")
    wanted, found = metrics(tmp_path / "one/test"), metrics(tmp_path / "many/test")
    assert [line["step"] for line in found] == [1, 2, 3] and [
        line["samples"] for line in found
    ] == [8, 8, 5]
    assert [line["loss"] for line in found] == pytest.approx(
        [line["loss"] for line in wanted], rel=1e-12
    )
    assert all(line["large"] == 3.0 for line in found)


def test_log_never_waits() -> None:
    """A worker logs as often as it wants while the others do something else."""

    def body(run: Run) -> None:
        if run.rank == 0:
            for n in range(2000):
                run.log(loss=1.0, n=n)
        run.barrier()

    workers(2, body)


def test_log_of_steps_and_evaluations(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model, opt, loader = ready(run, batches(16, 8))
        test = run.prepare(DataLoader(Numbered(5), batch_size=2), train=False)
        for x, y in loader:
            run.log(loss=advance(model, opt, x, y))
            for u, _ in test:
                run.log(ids=float(u[0, 0]) if len(u) else math.nan)
        run.log(final=1.0)

    workers(2, body, folder=tmp_path)
    lines = metrics(tmp_path / "test")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert (
        all(math.isfinite(line["ids"]) for line in lines if "loss" in line)
        and lines[-1]["final"] == 1.0
    )


@pytest.mark.parametrize("on_nan", ["warn", "stop"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_is_no_number(on_nan: Any, size: int, tmp_path: Path) -> None:
    said: list[str] = []

    def body(run: Run) -> int:
        model, opt, loader = ready(run, batches(80, 8))
        for _ in run.epochs(30):
            for n, (x, y) in enumerate(loader):
                loss = advance(model, opt, x, y)
                bad = run.rank == run.size - 1 and n >= 3 and run.steps < 10
                run.log(loss=math.nan if bad else loss)
        return run.steps

    steps = workers(size, body, said=said, on_nan=on_nan, folder=tmp_path)
    assert len(set(steps)) == 1
    assert (
        len(
            [
                text
                for text in said
                if f"loss was nan first on rank {size - 1}, at step 4" in text
                and "lower the learning" in text
            ]
        )
        == 1
    )
    if on_nan == "warn":
        assert steps[0] == 300
    else:
        assert steps[0] < 300 and any(text.startswith("stopping: ") for text in said)
    events = [
        event["what"].partition(" first")[0] for event in summary(tmp_path / "test")["events"]
    ]
    assert events == ["loss was nan", "stopped: loss was nan"][: 1 + (on_nan == "stop")]


def test_bad_values_for_log() -> None:
    with pytest.raises(UsageError, match="give one real number"):
        alone(lambda run: run.log(loss=torch.zeros(2)))
    with pytest.raises(UsageError, match="got a str"):
        alone(lambda run: run.log(loss="low"))
    with pytest.raises(UsageError, match="field 'step' of its own"):
        alone(lambda run: run.log(step=3))


# ---- mean, gather, clip


def test_mean() -> None:
    def body(run: Run) -> None:
        rank = float(run.rank)
        assert run.mean(rank) == 1.0 and isinstance(run.mean(rank), float)
        assert run.mean(run.rank, weight=run.rank) == pytest.approx((1 + 4) / 3)
        assert run.mean(math.nan if run.rank == 0 else 2.0, weight=rank) == 2.0
        x = torch.tensor([[rank, 1.0]], dtype=torch.bfloat16)
        found = run.mean(x)
        assert (
            found.dtype == torch.bfloat16
            and found.shape == (1, 2)
            and found.tolist() == [[1.0, 1.0]]
        )
        assert run.mean(torch.tensor([run.rank, 3])).tolist() == [1.0, 3.0]
        assert run.mean(torch.tensor(complex(0, rank))) == 1j
        assert run.mean(torch.tensor(rank, requires_grad=True)).requires_grad is False

    workers(3, body)


def test_mean_in_a_loop_is_weighted_by_samples() -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model, _, loader = ready(run, batches(21, 8), shares=shares)
        return torch.tensor([run.mean(F.mse_loss(model(x), y)) for x, y in loader])

    wanted = alone(lambda run: body(run, None))
    for size, shares in SHARES:
        for found in workers(size, lambda run, shares=shares: body(run, shares)):
            torch.testing.assert_close(found, wanted)


def test_means_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="weights of all workers are zero"):
        workers(2, lambda run: run.mean(1.0, weight=0))
    with pytest.raises(UsageError, match=r"rank 0: \(1,\).*rank 1: \(2,\)"):
        workers(2, lambda run: run.mean(torch.zeros(run.rank + 1)))
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="a weight is a number"):
            workers(2, lambda run, weight=weight: run.mean(1.0, weight=weight))


def test_sum() -> None:
    def body(run: Run) -> None:
        assert (
            run.sum(run.rank + 0.5) == 4.5
            and run.sum(run.rank) == 3
            and isinstance(run.sum(run.rank), int)
        )
        x = torch.tensor([[run.rank, 1.0]], dtype=torch.bfloat16, requires_grad=True)
        found = run.sum(x)
        assert (
            found.dtype == torch.bfloat16
            and found.tolist() == [[3.0, 3.0]]
            and not found.requires_grad
        )
        assert x.tolist() == [[run.rank, 1.0]]
        small = run.sum(torch.tensor([200, run.rank], dtype=torch.uint8))
        assert small.dtype == torch.int64 and small.tolist() == [600, 3]
        assert int(run.sum(torch.tensor(run.rank == 1))) == 1

    workers(3, body)
    with pytest.raises(UsageError, match=r"run.sum .*rank 0: \(1,\).*rank 1: \(2,\)"):
        workers(2, lambda run: run.sum(torch.zeros(run.rank + 1)))


GHOSTLY = [(2, None), (3, None), (2, [0, 8]), (4, [3, 0, 2, 3])]


def count_right(run: Run, shares: Any, way: str, **options: Any) -> tuple[Any, ...]:
    """How many predictions of a training epoch are right, and the sum of their losses; of 21
    samples, dealt by 5.
    """
    model = nn.Linear(6, 4).double()
    with torch.no_grad():
        model.weight.copy_(torch.arange(24.0).reshape(4, 6).sin())
        model.bias.zero_()
    data = DataLoader(Numbered(21, classes=4), batch_size=5)
    model, opt, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.5), data, shares=shares, **options
    )
    right, losses = torch.tensor(0), 0.0
    for x, y in loader:
        outputs = model(x)
        loss = F.cross_entropy(outputs, y, reduction="sum")
        (loss / len(x)).backward()
        opt.step()
        opt.zero_grad()
        each, value = (outputs.argmax(1) == y).sum(), float(loss.detach())
        if way == "in the turn":
            each, value = run.sum(each), run.sum(value)
        elif way == "by weight":
            each, value = each * (run.weight > 0), value * (run.weight > 0)
        right, losses = right + each, losses + value
    if way != "in the turn":
        right, losses = run.sum(right), run.sum(losses)
    return int(right), losses, model.weight.sum().item()


@pytest.mark.parametrize(("size", "shares"), GHOSTLY)
@pytest.mark.parametrize("way", ["in the turn", "by weight"])
def test_a_sum_over_an_epoch_counts_every_sample_once(size: int, shares: Any, way: str) -> None:
    right, *others = alone(lambda run: count_right(run, None, way))
    for found in workers(size, lambda run: count_right(run, shares, way)):
        assert found[0] == right and found[1:] == pytest.approx(others, rel=1e-12)


@pytest.mark.parametrize(
    ("shares", "way", "times"),
    [([0, 8], "at the end", 1), ([0, 8], "in the turn", 0), ([4, 4], "at the end", 1)],
)
def test_a_sum_of_what_a_loop_with_ghosts_has_added_up_is_said_once(
    shares: Any, way: str, times: int
) -> None:
    said: list[str] = []
    workers(2, lambda run: count_right(run, shares, way), said=said)
    assert len([text for text in said if "run.weight > 0" in text]) == times


def test_a_sum_over_an_evaluation_needs_nothing() -> None:
    def body(run: Run) -> tuple[int, int]:
        train, test = (
            run.prepare(DataLoader(Numbered(21), batch_size=5)),
            run.prepare(DataLoader(Numbered(21), batch_size=5), train=False),
        )
        for _, y in train:
            y.requires_grad_().sum().backward()
        samples = 0
        for x, _ in test:
            samples += len(x)
        inside = sum(run.sum(len(x)) for x, _ in test)
        return run.sum(samples), inside

    said: list[str] = []
    assert workers(3, body, said=said) == [(21, 21)] * 3
    assert not [text for text in said if "run.weight > 0" in text]


@pytest.mark.parametrize(("size", "shares"), SHARES)
@pytest.mark.parametrize("train", [True, False])
def test_gather_gives_rows_in_data_set_order(size: int, shares: Any, train: bool) -> None:
    def body(run: Run) -> list[int]:
        data = DataLoader(list(range(21)), batch_size=8)  # type: ignore[arg-type]
        loader = run.prepare(data, shares=shares, train=train)
        rows: list[int] = []
        for batch in loader:
            rows += run.gather(batch[:, None].expand(-1, 2))[:, 1].tolist()
            assert run.gather(batch[:, None]).shape == (
                run._loop.turn.global_batch if run._loop.turn else 0,
                1,
            )
        return rows

    assert workers(size, body) == [list(range(21))] * size


def test_accuracy_of_an_evaluation_equals_that_of_one_process() -> None:
    def body(run: Run, shares: Any) -> float:
        model = run.prepare(nn.Linear(6, 4).double())
        with torch.no_grad():
            model.weight.copy_(torch.arange(24.0).reshape(4, 6).sin())
            model.bias.zero_()
        loader = run.prepare(
            DataLoader(Numbered(103, classes=4), batch_size=8), train=False, shares=shares
        )
        right = torch.cat([run.gather(model(x).argmax(1) == y) for x, y in loader])
        assert len(right) == 103
        return right.double().mean().item()

    wanted = alone(lambda run: body(run, None))
    assert 0 < wanted < 1
    for size, shares in SHARES:
        assert workers(size, lambda run, shares=shares: body(run, shares)) == [wanted] * size


def test_gather_outside_of_a_loop() -> None:
    def body(run: Run) -> tuple[list[float], list[float]]:
        return run.gather(torch.tensor(float(run.rank))).tolist(), run.gather(
            torch.full((run.rank,), 5.0)
        ).tolist()

    assert workers(3, body) == [([0.0, 1.0, 2.0], [5.0] * 3)] * 3
    with pytest.raises(PacelineError):
        workers(2, lambda run: run.gather(torch.zeros(1, run.rank + 1)))


def test_clip() -> None:
    def body(run: Run, shares: Any) -> list[float]:
        model, opt, loader = ready(run, shares=shares)
        norms = []
        for n, (x, y) in enumerate(loader):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            what = model if n % 2 else list(model.parameters())
            norm = run.clip(what, 0.1, norm_type=2.0 if n < 3 else math.inf)
            norms.append(float(norm) if norm is not None else math.nan)
            opt.step()
        return norms

    wanted = alone(lambda run: body(run, None))
    for size, shares in SHARES:
        for found in workers(size, lambda run, shares=shares: body(run, shares)):
            assert found == pytest.approx(wanted, rel=1e-9)
    assert alone(lambda run: ready(run) and run.clip([], 1.0)) == 0


# ---- epochs and stop


def test_epochs_in_several_loops() -> None:
    def body(run: Run) -> list[int]:
        return [*run.epochs(3), *run.epochs(2), *run.epochs(0)]

    assert workers(2, body) == [[0, 1, 2, 0, 1]] * 2


@pytest.mark.parametrize("plain", [False, True])
def test_stop_asked_for_by_one_ends_the_loops_of_all(plain: bool) -> None:
    def body(run: Run) -> tuple[int, int, int]:
        model, opt, loader = ready(run)
        test = run.prepare(batches(9, 4), train=False)
        epochs = rows = turns = 0
        for epoch in range(60) if plain else run.epochs(60):
            epochs, turns = epochs + 1, 0
            for n, (x, y) in enumerate(loader):
                turns += 1
                advance(model, opt, x, y)
                if epoch == 2 and n == 1 and run.rank == 1:
                    run.stop()
            rows = sum(len(run.gather(u)) for u, _ in test)
        assert turns == 0 or not plain  # no loop over a training loader does anything any more
        return epochs, run.steps, rows

    first, second = workers(2, body)
    assert first == second and first[2] == 9
    assert first[1] < 60 * 5
    if not plain:
        assert 3 <= first[0] <= 4


def test_stop_between_epochs() -> None:
    def body(run: Run) -> int:
        count = 0
        for _ in run.epochs(10):
            count += 1
            if run.rank == 0 and count == 4:
                run.stop()
        return count

    assert workers(2, body) == [4, 4]


def test_stop_leaves_an_evaluation_under_way_alone() -> None:
    def body(run: Run) -> tuple[int, bool]:
        model, opt, loader = ready(run, batches(400, 8))
        test = run.prepare(batches(24, 4), train=False)
        held = iter(test)
        seen = len(next(held)[0])
        for x, y in loader:
            advance(model, opt, x, y)
            run.stop()
        return int(
            run.mean(float(seen + sum(len(x) for x, _ in held)), weight=1.0) * 2
        ), run.steps < 50

    assert workers(2, body) == [(24, True)] * 2


def test_time_left_where_lengths_are_not_known() -> None:
    class Endless:
        def __iter__(self) -> Any:
            yield [0, 1]
            yield [2, 3]

    def body(run: Run) -> Any:
        run.prepare(DataLoader(list(range(8)), batch_sampler=Endless()))  # type: ignore[arg-type]
        next(iter(run.epochs(1)))
        return run._log.total_steps

    assert alone(body) is None
    assert (
        alone(
            lambda run: [run.prepare(batches()), next(iter(run.epochs(3))), run._log.total_steps][
                -1
            ]
        )
        == 15
    )


def test_time_left_with_a_loader_for_validation() -> None:
    """Neither was told what it is for: the one that trains is known from its first step on, the
    other never counts.
    """

    def body(run: Run, before: bool) -> list[int | None]:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        model, opt, train, validation = run.prepare(
            model, opt, batches(), DataLoader(Numbered(9), batch_size=3)
        )
        seen = []

        def validate() -> None:
            with torch.no_grad():
                for x, _ in validation:
                    model(x)
            seen.append(run._log.total_steps)

        for _ in run.epochs(3):
            if before:
                validate()
            for x, _ in train:
                seen.append(run._log.total_steps)
                model(x).sum().backward()
                opt.step()
                opt.zero_grad()
            validate()
        return seen

    assert alone(lambda run: body(run, before=False)) == [15] * 18
    assert alone(lambda run: body(run, before=True)) == [None] + [15] * 20
    assert workers(2, lambda run: body(run, before=False)) == [[15] * 18] * 2


def test_time_left_with_two_loaders_that_train() -> None:
    """One after the other their turns are steps; side by side those of the first alone are."""

    def body(run: Run, beside: bool) -> list[int | None]:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        model, opt, one, other = run.prepare(
            model, opt, batches(), DataLoader(Numbered(20), batch_size=4)
        )
        seen = []
        for _ in run.epochs(2):
            for x in (
                (pair[0][0] for pair in zip(one, other, strict=True))
                if beside
                else (x for loader in (one, other) for x, _ in loader)
            ):
                model(x).sum().backward()
                opt.step()
                opt.zero_grad()
            seen.append((run._log.total_steps, run.steps))
        return seen

    assert alone(lambda run: body(run, beside=True)) == [(10, 5), (10, 10)]
    assert alone(lambda run: body(run, beside=False)) == [(20, 10), (20, 20)]


# ---- save and resume


class Kept:
    """Something of a user's own."""

    def __init__(self) -> None:
        self.best, self.history = math.inf, [(0, "start")]

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.history = state["best"], state["history"]


class Stopped(Exception):
    """The run dies here."""


def training(
    run: Run,
    *,
    save: Callable[[int], bool],
    die: int | None = None,
    between: bool = False,
    **options: Any,
) -> Any:
    """A script with all that is state; saves after some steps, dies after one, resumes what it
    finds.
    """
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=100)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    data = DataLoader(
        Numbered(21), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    model, opt, scheduler, scaler, loader = run.prepare(
        model, opt, scheduler, scaler, data, **options
    )
    kept = Kept()
    run.keep("best", kept)
    resumed = run.resume()
    losses, at = {}, run.steps
    for _ in run.epochs(3):
        for x, y in loader:
            opt.zero_grad()
            noisy = x + 0.1 * torch.rand(x.shape, dtype=x.dtype) if run.size == 1 else x
            loss = F.mse_loss(model(noisy), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            scheduler.step()
            mean = run.mean(loss.detach())
            losses[run.steps] = float(mean)
            kept.best = min(kept.best, float(mean))
            kept.history.append((run.steps, "done"))
            if save(run.steps + 1):
                run.save()
            if run.steps + 1 == die:
                raise Stopped
        if between:
            run.save()
    found = {"losses": losses, "weights": parameters(model), "kept": (kept.best, kept.history)}
    return {**found, "resumed": resumed, "from": at, "steps": run.steps}


def interrupted(
    folder: Path, size: int, later: int, die: int, save: Callable[[int], bool], **options: Any
) -> tuple[Any, list[str]]:
    """What comes of a run that dies after step `die`, and of a second one that resumes it on
    `later` workers.
    """
    said: list[str] = []
    with pytest.raises(Stopped):
        workers(size, lambda run: training(run, save=save, die=die, **options), folder=folder)
    torch.manual_seed(99)  # whatever the process has drawn in between
    return workers(
        later,
        lambda run: training(run, save=lambda step: False, **options),
        folder=folder,
        said=said,
    ), said


# 6 steps an epoch: in the middle, after the last turn of an epoch, after the first of the next
@pytest.mark.parametrize("step", [3, 6, 7, 11, 17])
def test_resume_is_bit_equal_on_one_worker(step: int, tmp_path: Path) -> None:
    torch.manual_seed(7)
    [wanted] = workers(1, lambda run: training(run, save=lambda step: False))
    torch.manual_seed(7)
    [found], said = interrupted(tmp_path, 1, 1, min(step + 2, 18), lambda at: at == step)
    assert found["resumed"] and found["from"] == step
    assert found["losses"] == {at: loss for at, loss in wanted["losses"].items() if at >= step}
    assert (
        torch.equal(found["weights"], wanted["weights"])
        and found["kept"] == wanted["kept"]
        and found["steps"] == 18
    )
    assert any("resumed from" in text and f"at step {step}" in text for text in said)


@pytest.mark.each_choice
@pytest.mark.parametrize(("size", "later"), [(2, 2), (2, 3), (3, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("step", [6, pytest.param(10, marks=pytest.mark.slow)])
def test_resume_by_another_number_of_workers(
    size: int, later: int, step: int, tmp_path: Path
) -> None:
    def quiet(run: Run) -> Any:
        return training(run, save=lambda step: False)

    wanted = workers(2, quiet)[0]
    found, _ = interrupted(tmp_path, size, later, step + 1, lambda at: at == step)
    if size != 1 and later != 1:  # one worker alone draws noise
        for one in found:
            assert one["losses"] == pytest.approx(
                {at: loss for at, loss in wanted["losses"].items() if at >= step}, rel=1e-9
            )
            assert distance(one["weights"], wanted["weights"]) < 1e-9
    assert all(
        one["steps"] == 18 and one["from"] == step and len(one["kept"][1]) == 19 for one in found
    )


@pytest.mark.parametrize("size", [1, 2])
def test_resume_between_epochs(size: int, tmp_path: Path) -> None:
    torch.manual_seed(7)
    wanted = workers(size, lambda run: training(run, save=lambda step: False))[0]
    torch.manual_seed(7)
    found, _ = interrupted(tmp_path, size, size, 14, lambda at: False, between=True)
    assert found[0]["from"] == 12
    assert (
        found[0]["losses"] == {at: loss for at, loss in wanted["losses"].items() if at >= 12}
        and len(found[0]["losses"]) == 6
    )


def test_resume_after_the_end_and_more_epochs(tmp_path: Path) -> None:
    def body(run: Run, epochs: int) -> list[int]:
        model, opt, loader = ready(run)
        run.resume()
        done = []
        for epoch in run.epochs(epochs):
            done.append(epoch)
            for x, y in loader:
                advance(model, opt, x, y)
        more = [*run.epochs(1)]
        run.save()
        return [*done, len(more)]

    assert workers(2, lambda run: body(run, 2), folder=tmp_path) == [[0, 1, 1]] * 2
    assert workers(2, lambda run: body(run, 2), folder=tmp_path) == [[0]] * 2
    with_more = workers(2, lambda run: body(run, 3), folder=tmp_path)
    assert with_more == [[0]] * 2  # the first loop was over when the second had begun


def test_more_epochs_after_a_save_at_the_end(tmp_path: Path) -> None:
    def body(run: Run, epochs: int) -> list[int]:
        model, opt, loader = ready(run)
        run.resume()
        done = []
        for epoch in run.epochs(epochs):
            done.append(epoch)
            for x, y in loader:
                advance(model, opt, x, y)
        run.save()
        return done

    assert alone(lambda run: body(run, 2)) == [0, 1]
    assert workers(1, lambda run: body(run, 2), folder=tmp_path) == [[0, 1]]
    assert workers(1, lambda run: body(run, 4), folder=tmp_path) == [[2, 3]]


def test_nothing_to_resume(tmp_path: Path) -> None:
    """It says where it looked, and what there is."""
    said: list[str] = []
    assert workers(2, lambda run: [ready(run), run.resume()][1], said=said, folder=tmp_path) == [
        False,
        False,
    ]
    looked = (
        f"nothing to resume, training begins anew: no checkpoint in {tmp_path}/test/checkpoints"
    )
    none = f"no run of {Path(sys.argv[0]).name} in {tmp_path} has one"
    assert f"{looked}; {none}" in said
    for step in (2, 3):
        saved = checkpoint.save_checkpoint(
            tmp_path / "other" / "checkpoints", make_snapshot({}), step
        )
    assert workers(2, lambda run: [ready(run), run.resume()][1], said=said, folder=tmp_path) == [
        False,
        False,
    ]
    looked = (
        f"nothing to resume, training begins anew: no checkpoint in {tmp_path}/test-2/checkpoints, "
        f"{tmp_path}/test/checkpoints"
    )
    hint = f"the newest is {saved}: run.resume('{tmp_path}/other') goes on from it"
    assert f"{looked}; {hint}" in said
    said.clear()
    (tmp_path / "other" / "live.json").write_text('{"live": {"script": "another.py"}}')
    assert workers(2, lambda run: [ready(run), run.resume()][1], said=said, folder=tmp_path) == [
        False,
        False,
    ]
    assert any(text.endswith(none) for text in said), said


@pytest.mark.parametrize("file", ["metrics", "summary", "trace"])
def test_a_folder_that_takes_nothing_more_ends_the_run_on_all_workers(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and each says why; though the file can't even be let go of."""
    ended: dict[int, BaseException] = {}

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def body(run: Run) -> None:
        model, opt, loader = ready(run)
        try:
            with run:
                for x, y in loader:
                    advance(model, opt, x, y)
                    run.log(loss=1.0)
                    if run.is_first and file == "metrics":
                        run.folder.metrics.symlink_to("/dev/full")
                    if run.is_first and file != "metrics":
                        getattr(run.folder, file).mkdir(exist_ok=True)
                    break
        except PacelineError as error:
            ended[run.rank] = error

    if file == "metrics":
        monkeypatch.setattr(MetricsWriter, "close", refuse)
    workers(3, body, folder=tmp_path, deadline=60)
    why = (
        rf"{file}\.jsonl? could not be written \((No space left on device|Is a directory)\); "
        r"free some space"
    )
    assert isinstance(ended[0], ResourceError) and re.search(why, str(ended[0])), ended
    for rank in (1, 2):
        assert isinstance(ended[rank], Mismatch | ViewChanged | WorkerLost), ended
        assert file == "metrics" or re.search(
            rf"the first worker failed at the summary with ResourceError: .*{why}", str(ended[rank])
        )


def test_a_run_without_a_name_has_nothing_to_resume(tmp_path: Path) -> None:
    saved = checkpoint.save_checkpoint(tmp_path / "other" / "checkpoints", make_snapshot({}), 7)

    def body(run: Run) -> bool:
        run._resumption._folder = RunFolder.create_together(
            run._context.agreement, tmp_path, None, say=print
        )
        ready(run)
        return run.resume()

    said: list[str] = []
    assert workers(2, body, said=said, folder=tmp_path) == [False, False]
    why = "this run has no name that an earlier run could have had, such as start(name='mine')"
    hint = f"the newest is {saved}: run.resume('{tmp_path}/other') goes on from it"
    assert f"nothing to resume, training begins anew: {why}; {hint}" in said


def test_a_corrupt_checkpoint_is_said_and_the_one_before_used(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        workers(
            2, lambda run: training(run, save=lambda step: step in (4, 8), die=9), folder=tmp_path
        )
    newest = sorted((tmp_path / "test/checkpoints").iterdir())[-1]
    body = next(path for path in newest.iterdir() if path.suffix == ".safetensors")
    body.write_bytes(body.read_bytes()[:-1] + b"?")
    said: list[str] = []
    found = workers(
        2, lambda run: training(run, save=lambda step: False), folder=tmp_path, said=said
    )
    assert found[0]["from"] == 4 and any(newest.name in text for text in said)


def test_checkpoints_of_something_else(tmp_path: Path) -> None:
    def body(run: Run, wide: bool) -> Any:
        model = nn.Linear(6, 3 if wide else 2)
        run.prepare(model)
        return run.resume() if wide else run.save()

    workers(2, lambda run: body(run, False), folder=tmp_path)
    with pytest.raises(
        (CheckpointError, Mismatch), match=r"model\.weight is float32\[2, 6\] in it"
    ):
        workers(2, lambda run: body(run, True), folder=tmp_path)


def test_save_gives_its_folder_and_keeps_the_newest(tmp_path: Path) -> None:
    def body(run: Run) -> list[Path]:
        model, opt, loader = ready(run)
        paths = []
        for x, y in loader:
            advance(model, opt, x, y)
            paths.append(run.save(keep=2))
        return paths

    first, second = workers(2, body, folder=tmp_path)
    assert first == second and len(set(first)) == 5
    assert [path.exists() for path in first] == [False, False, False, True, True]
    assert [path.name[-1] for path in first[3:]] == ["4", "5"]


def test_resume_of_a_named_folder(tmp_path: Path) -> None:
    workers(1, lambda run: [ready(run), run.save()], folder=tmp_path / "a")
    assert workers(
        2, lambda run: [ready(run), run.resume(tmp_path / "a/test")][1], folder=tmp_path / "b"
    ) == [True, True]
    assert workers(
        1,
        lambda run: [ready(run), run.resume(str(tmp_path / "a/test/checkpoints"))][1],
        folder=tmp_path / "b",
    ) == [True]


def test_keep_wants_a_state() -> None:
    with pytest.raises(UsageError, match="lacks state_dict or load_state_dict"):
        alone(lambda run: run.keep("x", object()))
    with pytest.raises(UsageError, match="already"):
        alone(lambda run: [run.keep("x", Kept()), run.keep("x", Kept())])


# ---- the end


def test_summary_and_trace(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model, opt, loader = ready(run, batches(21, 8))
        for _ in run.epochs(2):
            for x, y in loader:
                run.log(loss=advance(model, opt, x, y))
        run.event("something happened")
        run.results["score"] = 0.25 if run.is_first else 0.5

    for size in (1, 2):
        workers(size, body, folder=tmp_path / str(size))
        found = summary(tmp_path / f"{size}/test")
        assert found["sync"] == "AllReduce()" and found["workers"] == size and found["hosts"] == 1
        assert (
            found["steps"] == 6
            and found["samples"] == 42
            and found["seconds"] > 0
            and found["samples_per_second"] > 0
        )
        assert (
            set(found["step_seconds"]) == {"compute", "exchange", "wait", "data"}
            and min(found["step_seconds"].values()) >= 0
        )
        assert found["final_loss"] == pytest.approx(metrics(tmp_path / f"{size}/test")[-1]["loss"])
        assert (
            len(found["parameters_sha256"]) == 64
            and found["events"][0]["what"] == "something happened"
        )
        assert found["results"] == {"score": 0.25}
        assert found["bytes_sent"]["between"] == 0 and (found["bytes_sent"]["within"] > 0) == (
            size > 1
        )
        events = json.loads((tmp_path / f"{size}/test/trace.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert {event["pid"] for event in spans} == set(range(size)) and all(
            event["dur"] >= 0 for event in spans
        )
        turns = [event for event in spans if event["name"] == "turn"]
        assert len(turns) == 6 * size
        for turn in turns:  # is compute and exchange, and nothing else
            inside = [
                e
                for e in spans
                if e["cat"] in ("compute", "exchange")
                and (e["pid"], e["args"]) == (turn["pid"], turn["args"])
            ]
            assert [e["cat"] for e in sorted(inside, key=lambda e: e["ts"])] == (
                ["compute", "exchange", "compute"] if size > 1 else ["compute"]
            )
            assert sum(e["dur"] for e in inside) == pytest.approx(turn["dur"], abs=10)
    model = net()
    payload = sum(p.numel() for p in model.parameters()) * 8
    assert found["bytes_sent"]["within"] >= payload  # each step, over both workers


def test_the_hash_of_parameters_is_that_of_their_bits(tmp_path: Path) -> None:
    def body(run: Run, change: float) -> None:
        model = run.prepare(net())
        with torch.no_grad():
            model[0].bias[0] += change

    hashes = []
    for name, change, size in [("a", 0.0, 1), ("b", 0.0, 2), ("c", 1e-12, 1)]:
        workers(size, lambda run, change=change: body(run, change), folder=tmp_path / name)
        hashes.append(summary(tmp_path / f"{name}/test")["parameters_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_summary_counts_the_steps_of_this_run_alone(tmp_path: Path) -> None:
    found, _ = interrupted(tmp_path, 2, 2, 12, lambda at: at == 12)
    assert found[0]["steps"] == 18
    half = summary(tmp_path / "test-2")
    workers(2, lambda run: training(run, save=lambda step: False), folder=tmp_path / "whole")
    whole = summary(tmp_path / "whole/test")
    assert (half["steps"], whole["steps"], half["samples"], whole["samples"]) == (6, 18, 21, 63)
    # in a step of this run
    assert half["bytes_sent"]["within"] == pytest.approx(whole["bytes_sent"]["within"], rel=0.05)


def test_an_error_leaves_no_summary_and_ends_the_others(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model, opt, loader = ready(run)
        for x, y in loader:
            advance(model, opt, x, y)
            if run.rank == 1 and run.steps == 2:
                raise Stopped

    with pytest.raises(Stopped):
        workers(2, body, folder=tmp_path)
    assert not (tmp_path / "test/summary.json").exists()


def test_close_twice_and_after_use() -> None:
    def body(run: Run) -> None:
        model, opt, loader = ready(run)
        for x, y in loader:
            advance(model, opt, x, y)
        run.close()
        run.close()
        x, y = Numbered().x[:2], Numbered().y[:2]
        advance(model, opt, x, y)  # the model and optimizer go on by themselves

    workers(2, body)


def test_leaving_by_sys_exit_zero_closes_well(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        ready(run)
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        workers(1, body, folder=tmp_path)
    assert (tmp_path / "test/summary.json").exists()


# ---- calls made on some workers only


def one(call: Callable[[Run, Any], Any]) -> Callable[[Run], None]:
    """A training loop in which rank 1 alone does something at step 2."""

    def body(run: Run) -> None:
        model, opt, loader = ready(run)
        for _ in run.epochs(2):
            for x, y in loader:
                opt.zero_grad()
                F.mse_loss(model(x), y).backward()
                if run.rank == 1 and run.steps == 2 and call(run, x) == "return":
                    return
                opt.step()

    return body


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda run, x: run.mean(1.0), "run.mean"),
        (lambda run, x: run.sum(1.0), "run.sum"),
        (lambda run, x: run.gather(x), "run.gather"),
        (lambda run, x: run.save(), "run.save"),
        (lambda run, x: run.barrier(), "run.barrier"),
        (lambda run, x: run.resume(), "run.resume"),
        (lambda run, x: run.prepare(net()), "prepare"),
        (lambda run, x: run.first().__enter__(), "run.first"),
        (lambda run, x: run.group.all_reduce(x).wait(), "all_reduce"),
        # the end of it, or what is handed over about once a second
        (lambda run, x: "return", "log"),
    ],
)
def test_what_one_worker_does_alone_is_named_on_all(call: Any, named: str) -> None:
    caught: dict[int, str] = {}

    def body(run: Run) -> None:
        try:
            one(call)(run)
            run.close()
        except PacelineError as error:
            caught[run.rank] = f"{type(error).__name__}: {error}"
            raise

    with pytest.raises(PacelineError):
        workers(3, body)
    assert sorted(caught) == [0, 1, 2]
    assert all(named in text and "1" in text for text in caught.values()), caught
    assert any(text.startswith("Mismatch") for text in caught.values()), caught
