"""Steps of workers that are not in lockstep: clipped, refused without a loader, and given up
where a worker never comes.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.errors import DeadlineExceeded, UsageError
from paceline.servers.protocol.message import SentRequest
from paceline.servers.protocol.samples import GatherStep
from paceline.session.run import Run
from tests.harness.jobs import PATIENCE
from tests.harness.parameter_servers import SSP, Numbers, table, turn
from tests.harness.runs import workers


def test_clipped_by_its_own_norm() -> None:
    def body(run: Run) -> float:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        ready, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), 1.0), DataLoader(Numbers(20), 4)
        )
        for ids in loader:
            (8 * ready(torch.ones(len(ids), 1).double()).mean()).backward()
            assert float(run.clip(ready, 0.5)) == pytest.approx(8.0)
            optimizer.step()
            optimizer.zero_grad()
        run.barrier()
        return float(ready.weight.detach())

    assert workers(2, body, strategy=SSP)[0] == pytest.approx(-5 * 0.5, rel=1e-6)


def test_a_step_without_a_loader_is_refused() -> None:
    def body(run: Run) -> None:
        model = nn.Linear(1, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        model(torch.ones(1)).backward()
        with pytest.raises(UsageError, match="prepare the loader too"):
            optimizer.step()

    workers(2, body, strategy=SSP)


def test_a_worker_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named, own = threading.Event(), SentRequest.wait_for_reply

    def hasty(self: SentRequest[Any], seconds: float) -> Any:
        """Only the wait for the step is short."""
        return own(self, 0.5 if self.request is GatherStep else seconds)

    def body(run: Run) -> str:
        model, optimizer, loader = table(run)
        try:
            for ids in loader:
                if run.rank == 1:
                    assert named.wait(PATIENCE)
                    break
                turn(model, optimizer, ids)
        except DeadlineExceeded as error:
            named.set()
            assert error.missing == (1,)
            return str(error)
        return ""

    monkeypatch.setattr(SentRequest, "wait_for_reply", hasty)
    said: list[str] = []
    workers(2, lambda run: said.append(body(run)), strategy=SSP)
    text = next(text for text in said if text)
    assert re.search(
        r"rank 0 waited \S+ s in vain for rank 1, which has completed 0 turns", text
    ), text
