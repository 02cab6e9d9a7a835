"""What p.grad held before a pass is kept apart, also of a pass that C++ code begins and nobody
announces.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from paceline.session.run import Run
from tests.harness.runs import alone, batches, distance, workers

# Python 3.11 counts the depth of what it parses for all threads together (gh-106905)
SCRIPTING = threading.Lock()


def train(run: Run, first: bool) -> list[Tensor]:
    """Three passes, each begun in TorchScript but for the first, if that is announced; gradients
    are zeroed in place.
    """

    with SCRIPTING:

        @torch.jit.script  # type: ignore[untyped-decorator]
        def descend(x, weight, scale: float):  # type: ignore[no-untyped-def]
            ((x @ weight).sum() * scale).backward()

    model = nn.Linear(6, 2, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(0.5)
    found = []
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), batches(24, 8)
    )
    for number, (x, _) in enumerate(loader):
        scale = 1.0 / max(len(x), 1)
        if number == 0 and first:
            ((x @ model.weight.t()).sum() * scale).backward()
        else:
            descend(x, model.weight.t(), scale)
        found.append(model.weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        run.barrier()  # workers on threads have one engine: no pass of another one is under way
    return found


def test_passes_that_torchscript_begins_are_guarded() -> None:
    expected = alone(lambda run: train(run, False))
    for found in workers(2, lambda run: train(run, False)):
        assert all(distance(one, other) < 1e-9 for one, other in zip(found, expected, strict=True))


def test_some_passes_in_python_and_some_in_torchscript_are_refused() -> None:
    # TorchScript makes its own error of ours
    with pytest.raises(RuntimeError, match="began inside of TorchScript"):
        workers(2, lambda run: train(run, True))
