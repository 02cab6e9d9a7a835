"""Shares by speed in whole runs: each worker has other samples, and what comes of it is what one
worker comes to.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

import paceline as pl
from paceline.data.balance import SpeedCurve, WorkerSpeeds
from paceline.errors import DataError, UsageError
from paceline.session.run import Run
from paceline.unequal.shares.follower import OwnStep, ShareFollower
from tests.harness.pretended_speeds import PretendedSpeed, Speeds, pretended
from tests.harness.runs import Numbered, alone, distance, parameters, workers

COUNT, BATCH, EPOCHS = 250, 12, 4


class Named(Dataset[Any]):
    """Samples with their numbers."""

    def __init__(self) -> None:
        self.samples = Numbered(COUNT)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return index, *self.samples[index]


def net() -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    ).double()
    draw = torch.Generator().manual_seed(1)  # of its own, as ranks are threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 3)
    return model


Outcome = tuple[torch.Tensor, list[Counter[int]], list[int], list[tuple[int, ...]]]


def train(
    speeds: list[PretendedSpeed] | None, *, epochs: int = EPOCHS, **options: Any
) -> Callable[[Run], Outcome]:
    """Give weights, the samples of each epoch, the parts of this worker, and the shares as they
    were in each turn.
    """

    def body(run: Run) -> Outcome:
        model = net()
        data = DataLoader(
            Named(),
            batch_size=BATCH,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
            **options.get("reading", {}),
        )
        said = {key: value for key, value in options.items() if key not in ("reading", "unit")}
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05), data, **said
        )
        seen, mine, shares = [], [], []
        for _ in run.epochs(epochs):
            ids: Counter[int] = Counter()
            for number, x, y in loader:
                assert run._loop.turn is not None
                ids.update(number.tolist() if run._loop.turn.share else [])
                mine.append(run._loop.turn.share)
                if loader.terms.shares(BATCH) not in shares[-1:]:
                    shares.append(loader.terms.shares(BATCH))
                if speeds is not None:
                    speeds[run.rank].did(
                        round(run._loop.turn.units / options.get("unit", 1.0)) or len(x)
                    )
                F.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
            seen.append(ids)
        return parameters(model), seen, mine, shares

    return body


def balanced(
    size: int,
    speeds: Speeds,
    *,
    said: list[str] | None = None,
    strategy: Any = None,
    mesh: str | None = None,
    **options: Any,
) -> list[Outcome]:
    pretending = pretended(size, speeds)
    chosen = {"strategy": strategy} if strategy is not None else {}
    body = train(pretending, **{"shares": "auto", **options})
    return workers(size, body, said=said, mesh=mesh, quotas=pretending.__getitem__, **chosen)


def whole(found: list[Outcome]) -> list[Counter[int]]:
    """The samples of each epoch over all workers."""
    return [sum(parts, Counter()) for parts in zip(*(ids for _, ids, _, _ in found), strict=True)]


FIXED = 5.0  # seconds of a step


def by_rank(rank: int, step: int) -> float:
    return (1.0, 2.0, 4.0)[rank]


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("size", "options"),
    [(3, {}), (2, {"reading": {"num_workers": 1, "multiprocessing_context": "fork"}}), (2, {})],
    ids=str,
)
def test_shares_by_speed_change_no_sample_and_no_weight(size: int, options: dict[str, Any]) -> None:
    said: list[str] = []
    found = balanced(size, by_rank, said=said, **options)
    one = alone(train(None))
    assert whole(found) == [Counter(range(COUNT))] * EPOCHS
    assert all(distance(weights, one[0]) < 1e-9 for weights, *_ in found)
    assert len({tuple(shares) for *_, shares in found}) == 1, "all decide alike"
    slowest = max(FIXED + by_rank(rank, 0) * share for rank, share in enumerate(found[0][3][-1]))
    assert found[0][3][0] == (BATCH // size,) * size and slowest == 13.0, found[0][3]
    assert any(
        text.startswith("shares are now ")
        and f"rank {size - 1} on here takes " in text
        and " before" in text
        for text in said
    )


@pytest.mark.alike(1)
@pytest.mark.parametrize("unit", [1.0, 0.001])
def test_samples_that_differ_are_dealt_by_speed_and_cost(unit: float) -> None:
    """Costs of the samples add up to the parts of workers; each sample counts once, and weights
    are those of one worker.
    """
    found = balanced(2, by_rank, cost=lambda sample: unit * (1 + sample[0] % 7), unit=unit)
    assert (
        whole(found) == [Counter(range(COUNT))] * EPOCHS
        and distance(found[0][0], alone(train(None))[0]) < 1e-9
    )
    assert found[0][3][0] == (6, 6) and found[0][3][-1] == (8, 4) and found[0][3] == found[1][3]


def test_units_of_a_sample_are_as_they_were_until_there_are_steps_that_all_took() -> None:
    """A worker that has just come has the speeds of the others, and no step yet."""
    speeds = WorkerSpeeds()
    speeds.record_speeds(
        (0, 1),
        ("here", "here"),
        [SpeedCurve(0.001, 0.001), SpeedCurve(0.05, 0.002)],
        per_sample=100.0,
    )
    agreement = SimpleNamespace(
        origins=(0, 1), hosts=("here", "here"), group=SimpleNamespace(size=2)
    )
    terms = SimpleNamespace(speeds=speeds, is_alone=False, deals_by_cost=True, agreement=agreement)
    leader = SimpleNamespace(loader=SimpleNamespace(terms=terms))
    loop: Any = SimpleNamespace(turns=SimpleNamespace(leader=leader))
    history: Any = None
    ShareFollower(loop, [], history).take_drained([[], []])
    assert speeds.per_sample == 100.0


def test_steps_that_were_held_back_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first turns of an epoch have taken is known, without a backward, only when there
    is one: together, and of other steps.
    """
    taken: list[OwnStep] = []

    def take(follower: ShareFollower, drained: Any) -> None:
        taken.extend(OwnStep(*step) for steps in drained for step in steps)

    monkeypatch.setattr(ShareFollower, "take_drained", take)
    pretending = pretended(2, by_rank)

    def body(run: Run) -> int:
        model, data = net(), DataLoader(Named(), batch_size=BATCH)
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05), data, shares="auto"
        )
        for _ in run.epochs(2):
            for at, (_, x, y) in enumerate(loader):
                pretending[run.rank].did(len(x))
                if at >= 3:
                    F.mse_loss(model(x), y).backward()
                    opt.step()
                    opt.zero_grad()
        return run.steps

    assert workers(2, body, quotas=pretending.__getitem__) == [42, 42]
    assert len(taken) >= 2 * 2 * 30
    assert all(
        step.units in (6, 5) and step.own in (FIXED + step.units, FIXED + 2 * step.units)
        for step in taken
    ), taken


def test_equal_workers_keep_equal_shares() -> None:
    found = balanced(3, lambda rank, step: 1.0 + 0.001 * rank)
    assert all(shares == [(4, 4, 4)] for *_, shares in found)


def test_a_change_in_the_middle_is_followed_and_back() -> None:
    found = balanced(2, lambda rank, step: 2.5 if rank and 60 <= step < 180 else 1.0, epochs=15)
    assert found[0][3][0] == (6, 6) and found[0][3][-1] == (6, 6)
    assert (
        any(abs(share[1] / BATCH - 1 / 3.5) < 0.1 for share in found[0][3])
        and len(found[0][3]) <= 5
    )
    assert whole(found) == [Counter(range(COUNT))] * 15


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    "strategy",
    [pl.AllReduce(codec=pl.topk(0.5)), pl.LocalSGD(4), pl.ParameterServer(), pl.Gossip()],
    ids=lambda each: type(each).__name__,
)
def test_beside_other_strategies(strategy: Any) -> None:
    found = balanced(2, by_rank, strategy=strategy)
    assert whole(found) == [Counter(range(COUNT))] * EPOCHS and found[0][3][-1] == (8, 4)
    if isinstance(strategy, pl.ParameterServer):
        assert distance(found[0][0], alone(train(None))[0]) < 1e-9


def test_local_steps_are_weighted_by_shares() -> None:
    """A round of one step with plain SGD is AllReduce, whatever the shares are."""
    found = balanced(2, by_rank, strategy=pl.LocalSGD(1))
    assert found[0][3][-1] == (8, 4) and distance(found[0][0], alone(train(None))[0]) < 1e-9


def test_a_cut_model_has_shares_by_replica() -> None:
    """Workers with the same samples have one share: that of the slower one."""
    found = balanced(
        4,
        lambda rank, step: (1.0, 1.0, 1.0, 2.0)[rank],
        mesh="data=2, tensor=2",
        cut=pl.tensor({"0": pl.column(), "2": pl.row()}),
    )
    assert [shares[-1] for *_, shares in found] == [(8, 4)] * 4
    assert (
        distance(found[0][0], found[1][0]) >= 0
        and whole(found[::2]) == [Counter(range(COUNT))] * EPOCHS
    )


def test_speeds_are_saved_and_a_resumed_run_begins_with_them(tmp_path: Path) -> None:
    def begin(
        run: Run, pretending: list[PretendedSpeed], *, resume: bool, steps: int
    ) -> list[tuple[int, ...]]:
        model = net()
        data = DataLoader(
            Named(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05), data, shares="auto"
        )
        assert run.resume() == resume
        shares = []
        for _ in run.epochs(9):
            for _, x, y in loader:
                shares.append(loader.terms.shares(BATCH))
                pretending[run.rank].did(len(x))
                F.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
                if len(shares) == steps:
                    run.save()
                    return shares
        raise AssertionError

    def start(size: int, *, resume: bool, steps: int) -> list[list[tuple[int, ...]]]:
        pretending = pretended(size, by_rank)
        return workers(
            size,
            lambda run: begin(run, pretending, resume=resume, steps=steps),
            folder=tmp_path,
            quotas=pretending.__getitem__,
        )

    assert start(2, resume=False, steps=80)[0][-1] == (8, 4)
    assert all(shares == [(8, 4)] * 5 for shares in start(2, resume=True, steps=5))
    assert all(shares == [(4, 4, 4)] * 2 for shares in start(3, resume=True, steps=2)), (
        "others are as many, and begin anew"
    )


def test_a_calibration_that_is_disturbed_is_said_and_shares_stay_equal() -> None:
    said: list[str] = []
    draw = torch.Generator().manual_seed(2)
    noise = [
        [float(torch.rand((), generator=draw)) ** 3 * 9 + 0.1 for _ in range(2_000)]
        for _ in range(2)
    ]
    found = balanced(2, lambda rank, step: noise[rank][step], said=said, epochs=12)
    assert found[0][3] == [(6, 6)]
    texts = [text for text in said if text.startswith("step times vary too much")]
    assert (
        len(texts) == 2
        and "it is done again" in texts[0]
        and "shares stay equal until step times are steady" in texts[1]
    )


def test_what_a_worker_does_between_epochs_is_of_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[OwnStep] = []
    monkeypatch.setattr(
        ShareFollower,
        "take_drained",
        lambda follower, drained: taken.extend(
            OwnStep(*step) for steps in drained for step in steps
        ),
    )
    pretending = pretended(2, lambda rank, step: 1.0)

    def body(run: Run) -> None:
        model, data = net(), DataLoader(Named(), batch_size=BATCH)
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05), data, shares="auto"
        )
        for _ in run.epochs(3):
            for _, x, y in loader:
                pretending[run.rank].did(len(x))
                F.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
            pretending[run.rank].did(1000)  # an evaluation

    workers(2, body, quotas=pretending.__getitem__)
    assert len(taken) > 2 * 40 and all(step.own <= FIXED + step.units + 1.0 for step in taken), max(
        step.own for step in taken
    )


def test_the_last_shares_and_their_changes_are_in_the_summary(tmp_path: Path) -> None:
    pretending = pretended(2, by_rank)
    workers(2, train(pretending, shares="auto"), folder=tmp_path, quotas=pretending.__getitem__)
    summary = json.loads((tmp_path / "test" / "summary.json").read_text())
    assert summary["loader"] == {"num_workers": 0, "shares": [8, 4]}
    assert any(
        event["what"].startswith("shares are now 8 + 4: rank 1 on here takes 1.5 times as long")
        for event in summary["events"]
    ), summary["events"]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from Named()


def test_streams_follow_speeds_too() -> None:
    pretending = pretended(2, by_rank)

    def body(run: Run) -> tuple[list[int], tuple[int, ...]]:
        model = net()
        model, opt, loader = run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            DataLoader(Stream(), batch_size=BATCH),
            shares="auto",
        )
        ids = []
        for _ in run.epochs(5):
            for number, x, y in loader:
                assert run._loop.turn is not None
                ids += number.tolist() if run._loop.turn.share else []
                pretending[run.rank].did(len(x))
                F.mse_loss(model(x), y).backward()
                opt.step()
                opt.zero_grad()
        return ids, loader.terms.shares(BATCH)

    found = workers(2, body, quotas=pretending.__getitem__)
    assert sum((Counter(ids) for ids, _ in found), Counter()) == Counter(
        list(range(COUNT)) * 5
    ) and found[0][1] == (8, 4)


@pytest.mark.parametrize(
    ("strategy", "options", "error", "text"),
    [
        (
            pl.AllReduce(),
            {"shares": "fast"},
            DataError,
            "shares is 'fast': give 'auto', one number per worker, or a function",
        ),
        (
            pl.ParameterServer(staleness=2),
            {"shares": "auto"},
            DataError,
            "a fast one takes more by itself: leave out shares",
        ),
        (
            pl.AllReduce(),
            {"shares": "auto", "shard": "mine"},
            UsageError,
            "with shard=.mine. the stream deals them: leave out one of them",
        ),
    ],
    ids=["word", "staleness", "mine"],
)
def test_what_means_nothing_is_refused(
    strategy: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    def body(run: Run) -> None:
        run.prepare(
            DataLoader(Stream() if "shard" in options else Named(), batch_size=BATCH), **options
        )

    with pytest.raises(error, match=text):
        workers(2, body, strategy=strategy)
