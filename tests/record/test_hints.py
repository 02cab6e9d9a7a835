"""What a script of several workers lacks is said at its first step: nothing prepared, no loader,
an optimizer of another model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness.runs import batches, workers

NOTHING = (
    "nothing was given to run.prepare: if this script trains, "
    "each of the 2 workers does it for itself"
)
NO_LOADER = "no loader was given to run.prepare: each of the 2 workers takes batches of its own"
OUTSIDE = "an optimizer steps outside of a loop over the prepared loader"
FOREIGN = "the Adam steps on parameters that were not given to run.prepare"
USELESS = "the Adam steps, and trains nothing: none of its 2 parameters has a gradient"
ONE_LINE = (
    "run.log writes a line for each turn of a loader that was "
    "given to run.prepare, and there is none"
)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(6, 2).double()
    return model, torch.optim.Adam(model.parameters(), 0.01)


def train(
    run: Run, model: nn.Module, opt: torch.optim.Optimizer, loader: Any, *, log: bool = False
) -> None:
    for x, y in itertools.islice(loader, 3):
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
        if log:
            run.log(loss=1.0)


def nothing(run: Run) -> None:
    train(run, *parts(), batches())


def only_logs(run: Run) -> None:
    run.log(loss=1.0)


def only_epochs(run: Run) -> None:
    for _ in run.epochs(2):
        continue


def idle(run: Run) -> None:
    """Trains by hand, for all that is known."""


def loader_alone(run: Run) -> None:
    train(run, *parts(), run.prepare(batches()))


def no_loader(run: Run) -> None:
    model, opt = run.prepare(*parts())
    train(run, model, opt, batches(), log=True)


def no_loader_no_optimizer(run: Run) -> None:
    model, opt = parts()
    train(run, run.prepare(model), opt, batches())


def answer_ignored(run: Run) -> None:
    model, opt, loader = *parts(), batches()
    run.prepare(model, opt, loader)
    train(run, model, opt, loader)


def foreign(run: Run) -> None:
    model, opt, loader = run.prepare(*parts(), batches())
    train(run, model, opt, loader)
    train(run, *parts(), batches())


def useless(run: Run) -> None:
    model, _ = parts()
    other = torch.optim.Adam(parts()[0].parameters(), 0.01)
    model, other, loader = run.prepare(model, other, batches())
    train(run, model, other, loader)


SAID: list[tuple[Callable[[Run], None], list[str]]] = [
    (nothing, [NOTHING]),
    (only_logs, [NOTHING, ONE_LINE]),
    (only_epochs, [NOTHING]),
    (idle, [NOTHING]),
    (loader_alone, ["nothing but a loader was given to run.prepare"]),
    (no_loader, [NO_LOADER, ONE_LINE]),
    (no_loader_no_optimizer, [NO_LOADER]),
    (answer_ignored, [OUTSIDE]),
    (foreign, [FOREIGN]),
    (useless, [USELESS]),
]


def heard(body: Callable[[Run], None], size: int = 2, **options: Any) -> list[str]:
    said: list[str] = []
    workers(size, body, said=said, **options)
    return [text for text in said if "run.prepare" in text]


@pytest.mark.parametrize(("body", "lines"), SAID, ids=[body.__name__ for body, _ in SAID])
def test_what_a_script_lacks_is_said_once(body: Callable[[Run], None], lines: list[str]) -> None:
    found = heard(body)
    assert len(found) == len(lines)
    assert all(
        text.startswith(line) for text, line in zip(sorted(found), sorted(lines), strict=True)
    ), found
    assert heard(body, 1) == []


def test_an_optimizer_of_another_model_on_servers() -> None:
    assert [text.startswith(USELESS) for text in heard(useless, strategy=ParameterServer())] == [
        True
    ]


# ---- what lacks nothing


def complete(run: Run) -> None:
    model, opt, loader = run.prepare(*parts(), batches())
    train(run, model, opt, loader, log=True)
    train(run, model, opt, loader, log=True)


def closing(run: Run) -> None:
    """With a closure gradients come after the step has begun."""
    model, opt, loader = run.prepare(*parts(), batches())
    for x, y in loader:

        def closure(x: Any = x, y: Any = y) -> Any:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)


def of_the_loss(run: Run) -> None:
    """An optimizer of parameters that are in no model, and have gradients."""
    model, opt = parts()
    scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
    other = torch.optim.Adam([scale], 0.01)
    model, opt, other, loader = run.prepare(model, opt, other, batches())
    for x, y in loader:
        F.mse_loss(model(x) * scale, y).backward()
        opt.step()
        other.step()


def frozen(run: Run) -> None:
    """The optimizer of a part of the model that isn't used in the first step."""
    model = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)]).double()
    opts = [torch.optim.Adam(part.parameters(), 0.01) for part in model]
    ready = run.prepare(model, *opts, batches())
    for number, (x, y) in enumerate(ready[-1]):
        F.mse_loss(model[number % 2](x), y).backward()
        for opt in opts:
            opt.step()


def after_the_loop(run: Run) -> None:
    model, opt, loader = run.prepare(*parts(), batches())
    train(run, model, opt, loader)
    for _ in loader:
        continue
    train(run, model, opt, batches())


def only_talks(run: Run) -> None:
    run.mean(1.0)


@pytest.mark.parametrize(
    "body", [complete, closing, of_the_loss, frozen, after_the_loop, only_talks]
)
def test_nothing_is_said_of_a_script_that_lacks_nothing(body: Callable[[Run], None]) -> None:
    found = heard(body)
    assert [text for text in found if "an epoch of a loader had no backward" not in text] == [], (
        found
    )
