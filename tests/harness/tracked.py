"""Runs that are reported to trackers, and what their folder says of them."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.tracker import (
    TrackedEvent,
    TrackedRun,
    TrackedStep,
    TrackedSummary,
    Tracker,
)
from paceline.session.run import Run
from tests.harness.runs import workers

STEPS = 10


class Library:
    """A tracker's library, loaded when a test asks for something of it: all processes of the
    tests collect them, and one runs them.
    """

    def __init__(self, name: str) -> None:
        there = importlib.util.find_spec(name.partition(".")[0]) is not None
        self.marks = [
            pytest.mark.xdist_group("trackers"),
            pytest.mark.skipif(not there, reason=f"needs {name}"),
        ]
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def train(run: Run) -> None:
    """Two epochs over 17 samples in batches of 4, the last of 1; what is logged differs between
    workers.
    """
    torch.manual_seed(0)
    x = torch.arange(34.0).reshape(17, 2) / 34
    model = nn.Linear(2, 1)
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(x), batch_size=4)
    )
    for epoch in run.epochs(2):
        for (mine,) in loader:
            loss = (model(mine) - mine.sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss, rank=run.rank)
        run.log(
            **{"val/accuracy": epoch + run.rank},
            weights=pl.histogram(model.weight, 4),
            sample=pl.image(torch.eye(3) * epoch),
        )
        run.event(f"epoch {epoch} is over")
    run.results["score"] = 0.5


def reported(
    folder: Path, trackers: Iterable[Tracker], said: list[str] | None = None, **options: Any
) -> Path:
    """Train with two workers, report to `trackers`, and return the folder of the run."""
    workers(2, train, folder=folder, trackers=trackers, said=said, **options)
    return folder / "test"


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rows(folder: Path) -> dict[int, dict[str, float]]:
    """What trackers are to know of each step by the lines of the metrics; how late workers were
    isn't in them.
    """
    found: dict[int, dict[str, float]] = {}
    for line in lines(folder):
        found.setdefault(line["step"], {}).update(TrackedStep.from_line(line, ()).to_scalars())
    return found


def summary(folder: Path) -> dict[str, Any]:
    """The summary of a run."""
    return json.loads((folder / "summary.json").read_text())  # type: ignore[no-any-return]


class Notes:
    """A tracker that notes what it is told, and raises what it is given to raise."""

    def __init__(self, name: str = "notes", fails: Exception | None = None) -> None:
        self.name, self.fails = name, fails
        self.told: list[Any] = []

    def _note(self, *what: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.told.append(what[0] if len(what) == 1 else what)

    def begin_run(self, run: TrackedRun) -> str:
        self._note("begin", run)
        return "here"

    def log_steps(self, steps: Iterable[TrackedStep]) -> None:
        for step in steps:
            self._note("step", step.step)

    def log_media(self, items: Iterable[MediaItem]) -> None:
        for item in items:
            self._note("media", item.step, item.name)

    def log_event(self, event: TrackedEvent) -> None:
        self._note("event", event.what)

    def rewind_to_step(self, step: int) -> None:
        self._note("rewind", step)

    def log_summary(self, end: TrackedSummary) -> None:
        self._note("end", end)

    def close(self, *, failed: bool) -> None:
        self.told.append(("close", failed))
