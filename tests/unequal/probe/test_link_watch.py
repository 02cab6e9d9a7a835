"""A link that becomes slow is measured by all workers, and named with what would help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.observe.report import format_report
from paceline.record import log
from paceline.session.run import Run
from paceline.unequal.probe import link_watch, slow_links
from paceline.unequal.probe.link_watch import LinkWatch
from tests.harness.runs import batches, workers

# whose exchanges always count as slow, and those of two steps never
FLUSHES = {"TIMES": 0.0, "SHARE": -1.0, "TIMES_AT_ONCE": 1e9}
GLANCES = {"TIMES": 1e9, "TIMES_AT_ONCE": 0.0, "SHARE_AT_ONCE": -1.0, "GLANCE": 0.0}


def train(run: Run) -> None:
    model = nn.Linear(6, 2).double()
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), batches(400)
    )
    for x, y in loader:
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


@pytest.mark.each_choice
@pytest.mark.slow
@pytest.mark.parametrize("looks", [FLUSHES, GLANCES], ids=["flushes", "glances"])
@pytest.mark.parametrize(
    ("hosts", "whose"),
    [((0, 1, 2), "the link of host2"), ((0, 1), "the link between host0 and host1")],
)
def test_in_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[int, ...],
    whose: str,
    looks: dict[str, float],
) -> None:
    """Any exchange counts as slow, and the links of the last host are pretended to be, once
    those between threads have been measured.
    """
    monkeypatch.setattr(log, "_DRAIN_INTERVAL", 0.01)
    for name, value in ({"STEPS": 1, "LEAST": -1.0} | looks).items():
        monkeypatch.setattr(slow_links, name, value)
    monkeypatch.setattr(link_watch, "EXPLAINS", 0.0)
    monkeypatch.setattr(link_watch, "STREAM", 0.005)
    measured: Any = LinkWatch._measure_rates

    def slow(watch: LinkWatch) -> dict[tuple[int, int], float]:
        found = measured(watch)
        assert all(rate > 0 for rate in found.values()) and len(found) == len(hosts) * (
            len(hosts) - 1
        )
        return {pair: 10e6 if 2 in pair or len(hosts) == 2 else 100e6 for pair in found}

    monkeypatch.setattr(LinkWatch, "_measure_rates", slow)

    workers(len(hosts), train, folder=tmp_path, hosts=hosts)
    found = json.loads((tmp_path / "test/summary.json").read_text())["links"]
    assert found and found[0]["words"].rpartition(": ")[2].startswith(
        f"{whose} carries 80 Mbit/s"
    ), found
    assert f"From step {found[0]['step']} on exchanges take " in format_report(tmp_path / "test")


@pytest.mark.slow
def test_a_glance_that_finds_all_links_fine_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_DRAIN_INTERVAL", 0.01)
    for name, value in ({"STEPS": 1, "LEAST": -1.0, "PAUSE": 0.0} | GLANCES).items():
        monkeypatch.setattr(slow_links, name, value)
    measured: list[int] = []

    def fine(watch: LinkWatch) -> dict[tuple[int, int], float]:
        measured.append(watch._loop.steps_made)
        return {(0, 1): 1e12, (1, 0): 1e12}

    monkeypatch.setattr(LinkWatch, "_measure_rates", fine)

    workers(2, train, folder=tmp_path, hosts=(0, 1))
    summary = json.loads((tmp_path / "test/summary.json").read_text())
    assert len(measured) > 2 and summary["links"] == []
    assert not [event for event in summary["events"] if "exchanges take" in str(event)]


def test_what_coding_costs() -> None:
    sent, seconds = link_watch._estimate_codec_cost(2)
    assert 0.25 <= sent < 0.3 and seconds > 0
