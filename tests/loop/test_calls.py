"""How many functions of the package a step of plain AllReduce runs through, on one worker and on
two.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import paceline
from paceline.prepare.optimizers import OptimizerWatch
from paceline.session.run import Run
from tests.harness.runs import batches, workers

PACKAGE = str(Path(paceline.__file__).parent)
# steps after which buckets are laid out and first looks have been had; in the next one memory is
# not measured
WARM = 4
FEW, MANY = 2, 6  # layers
END = "sync/autograd.py:GradientTracker._end_if_outermost"


class Calls:
    """Counts calls of the package's functions (and resumptions of its generators) on this
    thread, by the phase of the step.
    """

    def __init__(self) -> None:
        self.phases: dict[str, Counter[str]] = {}

    @contextmanager
    def phase(self, name: str, run: Run) -> Iterator[None]:
        found, ended = self.phases.setdefault(name, Counter()), list[str]()

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                place = Path(frame.f_code.co_filename).relative_to(PACKAGE)
                if (
                    frame.f_code is OptimizerWatch.check_step.__code__
                    and frame.f_locals["self"] is not run._watch
                ):
                    # runs on threads are all told of each step, where processes have one run each
                    return
                name = f"{place}:{frame.f_code.co_qualname}"
                found[name] += 1
                if ended or name == END:
                    ended.append(name)

        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.phases[f"end of {name}"] = Counter(ended)


def steps(layers: int) -> Callable[[Run], Calls]:
    """The calls of one step, after some others."""

    def body(run: Run) -> Calls:
        generator = torch.Generator().manual_seed(5)
        model = nn.Sequential(
            *(nn.Linear(6, 6, bias=False, dtype=torch.float64) for _ in range(layers))
        )
        for parameter in model.parameters():
            parameter.data.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        model, optimizer, loader = run.prepare(model, optimizer, batches(48, 8))
        # or workers would meet in a step that happens to come a second later
        run._collector._meetings.next_step = 100
        turns = iter(loader)
        for _ in range(WARM):
            x, _ = next(turns)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        calls = Calls()
        with calls.phase("turn", run):
            x, _ = next(turns)
        optimizer.zero_grad()
        with calls.phase("forward", run):
            loss = model(x).square().mean()
        with calls.phase("backward", run):
            loss.backward()
        with calls.phase("step", run):
            optimizer.step()
        list(turns)
        return calls

    return body


# a turn; not what is done between two turns: samples are read, records kept
LOOP = ("loop", "data/loader.py")
STEP = (
    "session",
    "loop",
    "prepare",
    "record",
    "elastic",
    "replicas",
    "unequal",
    "workers",
    "sync",
)  # not the group, whose calls are those of what carries them


def counted(found: Counter[str], places: tuple[str, ...] = ("",)) -> int:
    """Calls of functions that lie in these places, without the frames that comprehensions have
    before Python 3.12.
    """
    return sum(
        n for name, n in found.items() if name.startswith(places) and not name.endswith("comp>")
    )


@pytest.fixture(scope="module", params=[1, 2])
def measured(request: pytest.FixtureRequest) -> tuple[Calls, Calls]:
    """The calls of a step with few gradients, and with many.

    Hooks that other tests have set on all optimizers are left out. Python collects no garbage
    meanwhile: it would call the run at moments that no test decides.
    """
    hooks = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    with pytest.MonkeyPatch.context() as patched:
        for name in hooks:
            patched.setattr(torch_optimizer, name, OrderedDict())
        collecting = gc.isenabled()
        gc.disable()
        try:
            few, *_ = workers(request.param, steps(FEW))
            many, *_ = workers(request.param, steps(MANY))
        finally:
            if collecting:
                gc.enable()
    return few, many


def test_a_step_of_an_optimizer(measured: tuple[Calls, Calls]) -> None:
    assert counted(measured[0].phases["step"]) <= 6, measured[0].phases["step"]


def test_a_turn_of_the_loader(measured: tuple[Calls, Calls]) -> None:
    found = measured[0].phases["turn"]
    # as often as this thread stood still, which the machine decides
    looks = found["loop/interruptions.py:InterruptionMeter._read_counters"]
    assert looks <= 2 and counted(found, LOOP) - looks <= 13, sorted(
        n for n in found.items() if n[0].startswith(LOOP)
    )


def test_a_backward(measured: tuple[Calls, Calls]) -> None:
    few, many = (calls.phases["backward"] for calls in measured)
    each = (counted(many, STEP) - counted(few, STEP)) / (MANY - FEW)
    assert each <= 3, many - few


def test_the_end_of_backward(measured: tuple[Calls, Calls]) -> None:
    assert counted(measured[0].phases["end of backward"], STEP) <= 10, measured[0].phases[
        "end of backward"
    ]
