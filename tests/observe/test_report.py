"""The report says where the time went, what to do about it, and what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.observe.report import report
from paceline.session.book import Book
from paceline.session.folder import Folder, Summary, Totals
from paceline.session.log import Log

QUIET = {"compute": 0.095, "exchange": 0.003, "wait": 0.001, "data": 0.001}


def finished(tmp_path: Path, parts: dict[str, float] | None = None, **changes: Any) -> Path:
    """A run that has ended, whose steps were split into `parts`."""
    parts = parts or QUIET
    folder = Folder.create(tmp_path, "run", say=lambda text: None)
    whole = 100 * sum(parts.values())
    fields: dict[str, Any] = {
        "sync": "AllReduce()",
        "workers": 2,
        "hosts": 1,
        "bytes_sent": {"within": 7.5e6, "between": 0.0},
        "codecs": [],
        "events": [],
        "checkpoints": {"count": 0, "stall_seconds": 0.0, "write_seconds": 0.0, "nbytes": 0},
    }
    ranks = changes.pop("ranks", [parts, parts])
    totals = Totals(100, 6400, changes.pop("seconds", whole * 1.01), 6400 / whole, changes.pop("loss", 1.2345), parts, ranks)
    Summary(totals=totals, parameters_sha256="00", **(fields | changes)).write(folder)
    return folder.path


def split(**parts: float) -> dict[str, float]:
    """Parts in seconds; what is left of 0.1 s is compute."""
    return {"compute": 0.1 - sum(parts.values()), "exchange": 0.0, "wait": 0.0, "data": 0.0} | parts


def test_a_quiet_run(tmp_path: Path) -> None:
    assert report(finished(tmp_path)) == (
        "run: AllReduce(), 2 workers on 1 host, 100 steps of 6,400 samples in all in 0:10; final loss 1.234\n"
        "\n"
        "A step took 100.0 ms (640 samples/s), mean over steps and workers:\n"
        "  compute    95%    95.0 ms  forward, backward and the optimizer\n"
        "  exchange    3%     3.0 ms  what could not be hidden behind compute\n"
        "  wait        1%     1.0 ms  for slower workers\n"
        "  data        1%     1.0 ms  for the next batch\n"
        "\n"
        "All workers together sent 7.5 MB within hosts and 0 bytes between hosts in a step.\n"
        "\n"
        "Nothing stands out: 95% of a step is compute."
    )


@pytest.mark.parametrize(
    ("counted", "words", "advice"),
    [
        ((1, 0.05, 0.4), "1 checkpoint: training stood still for 50.0 ms, and it was on the disk after 400.0 ms of writing.", ""),
        (
            (4, 0.1, 2.0),
            "4 checkpoints: training stood still for 25.0 ms each, and they were on the disk after 500.0 ms of writing each.",
            "",
        ),
        ((4, 2.0, 1.8), "4 checkpoints", "Checkpoints took 20% of the run: run.save(background=True) writes them"),
        ((9, 1.0, 9.0), "9 checkpoints", "Training stood still for checkpoints for 10% of the run: save less often"),
    ],
)
def test_checkpoints(tmp_path: Path, counted: tuple[float, ...], words: str, advice: str) -> None:
    saved = dict(zip(("count", "stall_seconds", "write_seconds"), counted, strict=True))
    text = report(finished(tmp_path, seconds=10.0, checkpoints=saved))
    assert words in text
    assert advice in text if advice else "Nothing stands out" in text


@pytest.mark.parametrize(
    ("sync", "hosts", "words"),
    [
        ("AllReduce()", 1, "A larger global batch"),
        ("AllReduce()", 2, "One copy per host is sent already"),
        ("AllReduce(via='ring')", 2, "AllReduce(via='hierarchical') send one copy per host"),
        ("AllReduce(via='hierarchical')", 2, "One copy per host is sent already"),
        ("AllReduce(via='tree')", 1, "AllReduce() goes through shared memory"),
    ],
)
def test_an_exposed_exchange(tmp_path: Path, sync: str, hosts: int, words: str) -> None:
    text = report(
        finished(tmp_path, split(exchange=0.04), sync=sync, hosts=hosts, bytes_sent={"within": 1e6, "between": 2e6 * (hosts > 1)})
    )
    assert "Exchange takes 40% of a step" in text
    assert words in text
    assert ("200 Mbit/s out of each host" in text) == (hosts == 2)


def test_a_slow_worker_is_named_with_shares_that_fit(tmp_path: Path) -> None:
    ranks = [split(wait=0.05), split(), split(wait=0.04)]
    text = report(finished(tmp_path, split(wait=0.03), ranks=ranks, workers=3))
    assert "Waiting for slower workers takes 30% of a step. The slowest is rank 1, with 100.0 ms of own work" in text
    assert "where the median is 60.0 ms" in text
    assert "prepare(..., shares=[1, 0.5, 0.83])" in text


def test_waiting_without_a_slowest(tmp_path: Path) -> None:
    text = report(finished(tmp_path, split(wait=0.03), ranks=[split(wait=0.03)] * 2))
    assert "no worker is the slowest throughout" in text
    assert "trace.json" in text


def test_slow_data(tmp_path: Path) -> None:
    assert "waited for during 25% of a step. Let others prepare it: DataLoader(..., num_workers=2" in report(
        finished(tmp_path, split(data=0.025))
    )


def test_time_outside_of_steps(tmp_path: Path) -> None:
    assert "Outside of steps: 0:10, 50% of the run" in report(finished(tmp_path, seconds=20.0))
    assert "Only 8% of the run was spent in steps" in report(finished(tmp_path, seconds=120.0))
    assert "Outside" not in report(finished(tmp_path))


def test_events(tmp_path: Path) -> None:
    text = report(finished(tmp_path, events=[{"time": 62.0, "what": "rank 1 on B was lost"}, {"time": 63.5, "what": "resumed", "more": 1}]))
    assert text.endswith("Events:\n     1:02  rank 1 on B was lost\n     1:04  resumed")


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    assert "final loss nan" in report(finished(tmp_path, loss=float("nan")))
    assert "loss" not in report(finished(tmp_path, loss=None))


def test_one_worker_sends_nothing(tmp_path: Path) -> None:
    text = report(finished(tmp_path, workers=1))
    assert "sent" not in text
    assert "mean over steps:" in text


# Unfinished and damaged -------------------------------------------------------------------------------------------------------


def unfinished(tmp_path: Path, steps: int = 3) -> Folder:
    folder = Folder.create(tmp_path, "run", say=lambda text: None)
    log = Log(Book(folder), say=lambda text: None)
    for step in range(1, steps + 1):
        log.log(step, {"loss": float(step)})
        log.step(step, 10, split(data=0.03))
    log.absorb([log.drain()])
    log.close()
    return folder


def test_a_run_that_has_not_ended(tmp_path: Path) -> None:
    folder = unfinished(tmp_path)
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "lo')  # being written
    text = report(folder.path)
    assert text.startswith("run has not ended (no summary.json): it is still running, or was broken off. So far: 3 steps of 30 samples")
    assert "last loss 3" in text
    assert "data       30%    30.0 ms" in text
    assert "waited for during 30%" in text


def test_what_a_codec_gained_is_told(tmp_path: Path) -> None:
    words = "int8() sent 1 MB a step where exact sums would have sent 4 MB; it paid."
    assert f"in a step.\n\n{words}\n\nNothing" in report(finished(tmp_path, codecs=[{"words": words}]))


def test_a_run_without_steps(tmp_path: Path) -> None:
    folder = Folder.create(tmp_path, "run", say=lambda text: None)
    assert report(folder.path).endswith("No step was finished, so there is nothing to tell about time.")
    folder.metrics.write_text("")
    assert "No step was finished" in report(folder.path)
    totals = Totals(0, 0, 1.0, None, None, split(compute=0.0), [])
    Summary("AllReduce()", 1, 1, totals, {"within": 0.0, "between": 0.0}, [], "00", {}, []).write(folder)
    assert "No step was finished" in report(folder.path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no run folder .*rnu; .* holds no runs"):
        report(tmp_path / "rnu")
    unfinished(tmp_path)
    with pytest.raises(UsageError, match=r"there is no run folder .*rnu; runs in .*: run$"):
        report(tmp_path / "rnu")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    unfinished(tmp_path)
    with pytest.raises(UsageError, match=r"is no run folder: it has neither .* it holds the runs run: name one of them"):
        report(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is damaged"), ("[]", "is damaged"), ("{}", "lacks 'steps'"), ('{"steps": "x"}', "is damaged")]
)
def test_a_damaged_summary(tmp_path: Path, text: str, words: str) -> None:
    folder = unfinished(tmp_path)
    folder.summary.write_text(text)
    with pytest.raises(UsageError, match=rf"summary\.json {words}"):
        report(folder.path)


def test_damaged_metrics(tmp_path: Path) -> None:
    folder = unfinished(tmp_path)
    folder.metrics.write_text("nonsense\n" + folder.metrics.read_text())
    with pytest.raises(UsageError, match=r"metrics\.jsonl is damaged in line 1"):
        report(folder.path)
    folder.metrics.write_text(json.dumps({"step": 1, "seconds": 3}) + "\n")
    with pytest.raises(UsageError, match="is not of this version"):
        report(folder.path)


def test_reporting_needs_no_torch() -> None:
    check = "import sys, paceline.observe.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
