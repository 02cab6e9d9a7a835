"""The endpoint, scraped and parsed as Prometheus does it, has what metrics.jsonl has; ports that
can't be had are said.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.record.trackers.prometheus import (
    DEFAULT_PORT,
    MAX_CALLERS,
    MetricsRequestHandler,
    PrometheusTracker,
)
from paceline.record.trackers.tracker import TrackedEvent, TrackedRun, TrackedStep
from paceline.session.run import Run
from paceline.unequal.stragglers.lateness import RankLateness
from tests.harness import strangers
from tests.harness.jobs import PATIENCE, free_port, wait_for
from tests.harness.runs import workers
from tests.harness.tracked import STEPS, lines, train

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, tuple[str, ...]], float]
PAGE = Path(__file__).parents[3] / "docs" / "looking.md"


def families(url: str) -> Sequence[Any]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def scrape(url: str) -> Samples:
    """The samples at an address, by name and labels but for the run."""
    found: Samples = {}
    for family in families(url):
        for sample in family.samples:
            assert sample.labels["run"]
            labels = (
                sample.labels.get(name)
                for name in ("part", "worker", "cause", "name", "sync", "seed")
            )
            found[sample.name, tuple(label for label in labels if label is not None)] = sample.value
    return found


def address(said: Sequence[str]) -> str:
    return next(line for line in said if line.startswith("prometheus: ")).removeprefix(
        "prometheus: "
    )


def test_numbers_are_those_of_the_log(tmp_path: Path) -> None:
    said, found = list[str](), list[Samples]()

    def body(run: Run) -> None:
        train(run)
        run._log.hand_over(run._agreement)  # as another second of training would
        if run.is_first:
            url = address(said)
            wait_for(lambda: scrape(url)["paceline_steps_total", ()] == STEPS)
            found.append(scrape(url))
        run.barrier()

    workers(2, body, folder=tmp_path, trackers=[PrometheusTracker("0")], said=said)
    (samples,) = found
    kept = lines(tmp_path / "test")
    steps = [line for line in kept if "seconds" in line]
    # what was logged behind the last step comes at the end
    last = {name: value for line in kept[:-1] for name, value in line.items()}
    assert samples["paceline_step", ()] == STEPS
    assert samples["paceline_samples_total", ()] == 34 == sum(line["samples"] for line in steps)
    for part in ("compute", "exchange", "wait", "data"):
        assert samples["paceline_step_seconds_total", (part,)] == pytest.approx(
            sum(line["seconds"][part] for line in steps)
        )
    assert {key[1][0]: value for key, value in samples.items() if key[0] == "paceline_logged"} == {
        name: last[name] for name in ("loss", "rank", "val/accuracy")
    }
    assert samples["paceline_samples_per_second", ()] > 0
    assert samples["paceline_events_total", ()] >= 2
    with pytest.raises(OSError):
        scrape(address(said))  # the port is free again


def told(tracker: PrometheusTracker, folder: Path) -> str:
    where = tracker.begin_run(TrackedRun("x", folder, "id", 0.0, {"sync": 'a"b', "seed": 3}))
    late = [RankLateness(1, {"compute": 0.25, "reading": 0.5})]
    tracker.log_steps(
        [
            TrackedStep(3, 0.0, {"loss": 2.0}, 8, {"compute": 0.5}, late),
            TrackedStep(4, 0.0, {"loss": 1.0}, 8, {"compute": 0.5}, late),
        ]
    )
    tracker.log_steps([TrackedStep(4, 0.0, {"val/x": float("nan")})])
    tracker.log_event(TrackedEvent(0.0, "x"))
    return where


def test_counters_and_gauges_have_the_names_of_the_page(tmp_path: Path) -> None:
    tracker = PrometheusTracker("0")
    url = told(tracker, tmp_path)
    kinds = {
        family.name: (family.type, family.samples[0].labels.keys()) for family in families(url)
    }
    samples = scrape(url)
    tracker.close(failed=False)
    tracker.close(failed=False)
    assert samples["paceline_late_seconds_total", ("1", "reading")] == 1.0
    assert samples["paceline_samples_per_second", ()] == 16.0
    assert samples["paceline_run_info", ('a"b', "3")] == 1.0
    rows = re.findall(
        r"^\| `(paceline_\w+)` \| (counter|gauge) \|([^|]*)\|", PAGE.read_text(), re.MULTILINE
    )
    documented = {
        name.removesuffix("_total"): (kind, {"run", *re.findall(r"`(\w+)`", labels)})
        for name, kind, labels in rows
    }
    documented.pop("paceline_run_info")
    kinds.pop("paceline_run_info")
    assert {name: (kind, set(labels)) for name, (kind, labels) in kinds.items()} == documented


def test_a_port_in_use_is_said_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"127\.0\.0\.1:{port}' can't listen there .*prometheus:{port + 1}"
        ) as found:
            PrometheusTracker(str(port)).begin_run(TrackedRun("x", tmp_path, "id", 0.0))
    assert "\n" not in str(found.value)


def test_it_listens_where_it_is_asked_to(tmp_path: Path) -> None:
    port = free_port()
    tracker = PrometheusTracker(f"[::1]:{port}")
    assert told(tracker, tmp_path) == f"http://[::1]:{port}/metrics"
    assert scrape(f"http://[::1]:{port}/metrics")["paceline_step", ()] == 4
    tracker.close(failed=False)
    assert (
        vars(PrometheusTracker(""))["_host"] == "127.0.0.1"
        and vars(PrometheusTracker(""))["_port"] == DEFAULT_PORT
    )


def test_strangers_that_say_nothing_cost_few_threads_and_descriptors(tmp_path: Path) -> None:
    """The endpoint is in the process that trains."""
    tracker = PrometheusTracker("0")
    url = told(tracker, tmp_path)
    point = "127.0.0.1", int(url.split(":")[2].partition("/")[0])
    threads, before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with strangers.held_open(point, 6 * MAX_CALLERS) as silent:
        # the last in the queue: all others have been taken
        assert scrape(url)["paceline_step", ()] == 4
        assert threading.active_count() - threads <= MAX_CALLERS + 1
        assert len(os.listdir("/proc/self/fd")) - before <= len(silent) + MAX_CALLERS + 1
    tracker.close(failed=False)


def test_who_says_nothing_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricsRequestHandler, "timeout", 0.05)
    tracker = PrometheusTracker("0")
    url = told(tracker, tmp_path)
    with socket.create_connection(
        ("127.0.0.1", int(url.split(":")[2].partition("/")[0])), PATIENCE
    ) as silent:
        assert silent.recv(1) == b""
    tracker.close(failed=False)
