"""Numbers of all workers come together as weighted means, nobody waits, and a loss that is no
number is traced to its rank.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from paceline.comm.agreement import Agreement
from paceline.errors import ResourceError, UsageError
from paceline.record.display import PlainLines
from paceline.record.folder import RunFolder
from paceline.record.log import MetricsLog, OnNan
from paceline.record.logged.histogram import histogram
from paceline.record.logged.host_copy import HostCopy
from paceline.record.logged.image import image
from paceline.record.status_line import StatusLine
from paceline.record.writer import MetricsWriter
from tests.harness.clocks import Clock
from tests.harness.thread_groups import ThreadGroup, spawn

SECONDS = {"compute": 0.6, "exchange": 0.2, "wait": 0.1, "data": 0.1}


def silent(text: str) -> None:
    raise AssertionError(f"nothing to say, but said: {text}")


def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create_folder(tmp_path, "run", say=silent)


def job(
    tmp_path: Path, size: int, *, on_nan: OnNan = "warn", say: Callable[[str], None] = silent
) -> tuple[list[MetricsLog], RunFolder]:
    """The logs of `size` workers, the first with a book."""
    where = folder(tmp_path)
    return [
        MetricsLog(
            MetricsWriter(where) if rank == 0 else None, on_nan=on_nan, say=say, clock=Clock()
        )
        for rank in range(size)
    ], where


def flush(logs: list[MetricsLog], *, last: bool = False) -> list[str | None]:
    bodies = [log.drain(last=last) for log in logs]
    return [log.absorb(bodies) for log in logs]


def lines(where: RunFolder) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in where.metrics.read_text().splitlines()]
        if where.metrics.exists()
        else []
    )


def test_the_mean_is_weighted_over_workers_and_calls(tmp_path: Path) -> None:
    logs, where = job(tmp_path, 3)
    logs[0].add_values(1, {"loss": torch.tensor(1.0, requires_grad=True), "rate": 0.5}, 6)
    logs[1].add_values(1, {"loss": torch.tensor([4.0], dtype=torch.bfloat16), "rate": 0.5}, 1)
    logs[1].add_values(1, {"loss": 6, "only here": True}, 1)  # a second micro-batch
    logs[2].add_values(1, {"loss": math.nan}, 0)  # a ghost
    for log in logs:
        log.end_step(1, 8, SECONDS)
    assert flush(logs) == [None, None, None]
    found = {
        "step": 1,
        "time": 0.0,
        "loss": 2.0,
        "rate": 0.5,
        "only here": 1.0,
        "samples": 8,
        "seconds": SECONDS,
    }
    assert lines(where) == [
        found | {"ranks": {str(rank): [1, *SECONDS.values(), 0.0] for rank in range(3)}}
    ]


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        True,
        np.float32(2),
        np.int64(2),
        np.bool_(True),
        torch.tensor(2),
        torch.ones(1, 1, 1),
    ],
)
def test_kinds_of_numbers(tmp_path: Path, value: Any) -> None:
    logs, where = job(tmp_path, 1)
    logs[0].add_values(1, {"x": value})
    logs[0].end_step(1, 1, SECONDS)
    flush(logs)
    assert lines(where)[0]["x"] == float(value)


@pytest.mark.parametrize(
    "value", ["text", None, [1.0], torch.ones(2), torch.ones(()) * 1j, torch.empty(0), 1j]
)
def test_what_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    logs, _ = job(tmp_path, 1)
    with pytest.raises(UsageError, match=r"run\.log\(acc=\.\.\.\) got a "):
        logs[0].add_values(1, {"acc": value}, 0)


@pytest.mark.parametrize("name", ["step", "time", "samples", "seconds"])
def test_names_of_our_own_are_refused(tmp_path: Path, name: str) -> None:
    logs, _ = job(tmp_path, 1)
    with pytest.raises(UsageError, match="give it another name"):
        logs[0].add_values(1, {name: 1.0})


def test_a_value_is_kept_as_it_was(tmp_path: Path) -> None:
    logs, where = job(tmp_path, 1)
    running = torch.zeros(())
    for step in (1, 2):
        running += 1
        logs[0].add_values(step, {"running": running})
        logs[0].end_step(step, 1, SECONDS)
    flush(logs)
    assert [line["running"] for line in lines(where)] == [1.0, 2.0]


def test_a_step_is_written_once_all_have_handed_it_over(tmp_path: Path) -> None:
    logs, where = job(tmp_path, 2)
    for step in (1, 2):
        logs[0].add_values(step, {"loss": 1.0})
        logs[0].end_step(step, 4, SECONDS)
    logs[1].add_values(1, {"loss": 3.0})
    logs[1].end_step(1, 4, SECONDS)
    flush(logs)
    assert [line["loss"] for line in lines(where)] == [2.0]
    logs[1].add_values(2, {"loss": 5.0})
    logs[1].end_step(2, 4, SECONDS)
    flush(logs)
    assert [line["loss"] for line in lines(where)] == [2.0, 3.0]


def test_a_void_step_leaves_nothing(tmp_path: Path) -> None:
    logs, where = job(tmp_path, 1)
    logs[0].add_values(1, {"loss": math.nan})
    logs[0].discard_open_steps()
    logs[0].add_values(1, {"loss": 2.0})
    logs[0].end_step(1, 4, SECONDS)
    flush(logs)
    assert [line["loss"] for line in lines(where)] == [2.0]


def test_results_of_an_evaluation_come_with_the_step_before(tmp_path: Path) -> None:
    logs, where = job(tmp_path, 2)
    for step in (1, 2):
        for rank, log in enumerate(logs):
            log.add_values(step, {"loss": float(step)})
            log.end_step(step, 4, SECONDS)
            log.add_values(step, {"validation": float(step * 10 + rank)})
        flush(logs)
    flush(logs, last=True)
    found = [
        {key: line[key] for key in line if key in ("step", "loss", "validation")}
        for line in lines(where)
    ]
    assert found == [
        {"step": 1, "loss": 1.0},
        {"step": 1, "validation": 10.5},
        {"step": 2, "loss": 2.0},
        {"step": 2, "validation": 20.5},
    ]
    totals = logs[0].compute_totals()
    assert totals is not None
    assert totals.steps == 2


def test_the_end_is_the_same_for_who_has_logged_nothing(tmp_path: Path) -> None:
    logs, where = job(tmp_path, 2)
    logs[0].add_values(0, {"before training": 1.0})
    flush(logs, last=True)
    assert lines(where) == [{"step": 0, "time": 0.0, "before training": 1.0}]


def test_any_order_of_drains_gives_the_same_means(tmp_path: Path) -> None:
    draw = random.Random(3)
    logs, where = job(tmp_path, 3)
    expected: dict[int, float] = {}
    for step in range(1, 60):
        values = [(draw.random(), draw.choice([0, 1, 5])) for _ in logs]
        weight = sum(w for _, w in values)
        if weight:
            expected[step] = sum(v * w for v, w in values) / weight
        for log, (value, w) in zip(logs, values, strict=True):
            log.add_values(step, {"loss": value}, w)
            log.end_step(step, 8, SECONDS)
        if draw.random() < 0.3:
            flush(logs)
    flush(logs, last=True)
    found = {line["step"]: line["loss"] for line in lines(where) if "loss" in line}
    assert found == pytest.approx(expected)
    assert [line["step"] for line in lines(where)] == list(range(1, 60))


def test_finish_in_a_group(tmp_path: Path) -> None:
    where = folder(tmp_path)

    def body(group: ThreadGroup) -> Any:
        log = MetricsLog(MetricsWriter(where) if group.rank == 0 else None, say=silent)
        for step in range(1, 6):
            log.add_values(step, {"loss": float(group.rank)}, group.rank + 1)
            log.end_step(step, 4, SECONDS)
        log.finish(Agreement(group))
        log.close()
        return log.compute_totals()

    totals = spawn(3, body)
    assert [line["loss"] for line in lines(where)] == [8 / 6] * 5
    assert totals[1:] == [None, None]
    assert (totals[0].steps, totals[0].samples, totals[0].final_loss) == (5, 20, 8 / 6)


# Devices
# --------------------------------------------------------------------------------------------------


class Later(HostCopy):
    """A copy that arrives when the test says so."""

    arrived = False

    def has_arrived(self) -> bool:
        return type(self).arrived


def test_what_is_on_its_way_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sums", "media", "metric"):
        monkeypatch.setattr(f"paceline.record.logged.{module}.HostCopy", Later)
    monkeypatch.setattr(
        "paceline.record.logged.values.to_number",
        lambda name, value: torch.tensor(value, dtype=torch.float64),
    )
    logs, where = job(tmp_path, 1)
    for step in (1, 2):
        logs[0].add_values(step, {"loss": 1.0}, 3)
        logs[0].add_values(step, {"loss": 5.0}, 1)
        logs[0].end_step(step, 4, SECONDS)
    flush(logs)
    assert lines(where) == []
    monkeypatch.setattr(Later, "arrived", True)
    flush(logs)
    assert [line["loss"] for line in lines(where)] == [2.0, 2.0]
    monkeypatch.setattr(Later, "arrived", False)
    logs[0].add_values(3, {"loss": 7.0})
    logs[0].end_step(3, 4, SECONDS)
    flush(logs, last=True)  # the end does wait
    assert lines(where)[-1]["loss"] == 7.0


@pytest.mark.parametrize("value", [histogram(torch.ones(2)), image(torch.ones(2, 2))])
def test_a_step_waits_for_what_it_shows(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.record.logged.media.HostCopy", Later)
    logs, where = job(tmp_path, 1)
    logs[0].add_values(1, {"loss": 1.0, "shown": value})
    logs[0].end_step(1, 4, SECONDS)
    flush(logs)
    assert lines(where) == []
    monkeypatch.setattr(Later, "arrived", True)
    flush(logs)
    assert [line["loss"] for line in lines(where)] == [1.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_logging_on_cuda_does_not_synchronise(tmp_path: Path) -> None:
    logs, where = job(tmp_path, 1)
    x = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.Event()
    for step in range(1, 4):
        logs[0].add_values(step, {"loss": x * step, "other": x}, 2)
        logs[0].end_step(step, 4, SECONDS)
    busy.record()
    flush(logs)
    assert not busy.query()
    assert lines(where) == []
    flush(logs, last=True)
    assert [line["loss"] for line in lines(where)] == [1.0, 2.0, 3.0]


# Losses that are no numbers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_nan", ["warn", "stop"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_rank_and_step_are_named_once(
    tmp_path: Path, on_nan: OnNan, value: float
) -> None:
    said: list[str] = []
    logs, where = job(tmp_path, 3, on_nan=on_nan, say=said.append)
    reasons = []
    for step in range(1, 7):
        for rank, log in enumerate(logs):
            log.add_values(step, {"loss": value if step > 4 or (rank == 2 and step == 4) else 1.0})
            log.end_step(step, 4, SECONDS)
        if step % 2 == 0:
            reasons += flush(logs)
    reason = f"loss was {value} first on rank 2, at step 4"
    assert reasons == [None] * 3 + ([reason] * 6 if on_nan == "stop" else [None] * 6)
    assert len(said) == 3  # each worker once; who says it aloud is for the session
    assert all(text.startswith(f"{reason}. The weights are likely lost") for text in said)
    assert ("would have stopped" in said[0]) == (on_nan == "warn")
    assert [line["loss"] for line in lines(where)] == [1.0] * 3 + [str(value)] * 3
    assert all("NaN" not in text for text in where.metrics.read_text().splitlines())


def test_an_earlier_one_of_a_slower_rank_is_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    logs, _ = job(tmp_path, 2, on_nan="stop", say=said.append)
    logs[0].add_values(1, {"loss": 1.0})
    logs[0].end_step(1, 4, SECONDS)
    logs[0].add_values(2, {"loss": math.nan})
    logs[0].end_step(2, 4, SECONDS)
    assert flush(logs) == [None, None]  # rank 1 hasn't handed anything over
    logs[1].add_values(1, {"loss": math.nan})
    logs[1].end_step(1, 4, SECONDS)
    logs[1].end_step(2, 4, SECONDS)
    assert flush(logs) == ["loss was nan first on rank 1, at step 1"] * 2


def test_only_losses_are_judged(tmp_path: Path) -> None:
    logs, _ = job(tmp_path, 1, on_nan="stop")
    logs[0].add_values(1, {"perplexity": math.inf, "train_loss": 1.0})
    logs[0].end_step(1, 4, SECONDS)
    assert flush(logs) == [None]


def test_unknown_on_nan() -> None:
    with pytest.raises(UsageError, match="on_nan='ignore' is unknown"):
        MetricsLog(None, on_nan="ignore", say=silent)  # type: ignore[arg-type]


# Pace, totals, files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "ahead"), [(0.001, 20), (0.3, 20), (1.0, 10), (2.0, 5), (40.0, 1)]
)
def test_drains_are_a_second_apart(seconds: float, ahead: int) -> None:
    clock = Clock()
    log = MetricsLog(None, say=silent, clock=clock)
    log.drain()
    for step in range(10):
        log.end_step(step, 1, SECONDS)
    clock.now += seconds
    log.drain()
    assert log.steps_ahead() == ahead


def test_totals(tmp_path: Path) -> None:
    logs, _ = job(tmp_path, 2)
    for step in range(11, 15):  # after a resume
        for rank, log in enumerate(logs):
            log.add_values(step, {"loss": float(step)})
            log.end_step(
                step, 10, {"compute": 1.0 + rank, "exchange": 0.5, "wait": 1.0 - rank, "data": 0.0}
            )
    flush(logs)
    totals = logs[0].compute_totals()
    assert totals is not None
    assert (totals.steps, totals.samples, totals.final_loss) == (4, 40, 14.0)
    assert totals.step_seconds == {"compute": 1.5, "exchange": 0.5, "wait": 0.5, "data": 0.0}
    assert [seconds["compute"] for seconds in totals.rank_seconds] == [1.0, 2.0]
    assert totals.rank_work == [{"seconds": 1.0, "late": 0.0}, {"seconds": 2.0, "late": 1.0}]
    assert totals.samples_per_second == 4.0


def test_bytes_and_what_each_worker_did(tmp_path: Path) -> None:
    logs, where = job(tmp_path, 2)
    for step in range(1, 4):
        for rank, log in enumerate(logs):
            log.end_step(step, 10, SECONDS | {"within": 100.0 * rank, "between": 7.0 * (step > 1)})
    flush(logs)
    first, second, third = lines(where)
    assert first["bytes_sent"] == {"within": 100, "between": 0}
    assert second["bytes_sent"] == third["bytes_sent"] == {"within": 100, "between": 14}
    assert "ranks" not in first and list(third["ranks"]) == ["0", "1"]
    assert third["ranks"]["1"] == pytest.approx(
        [3, *(3 * value for value in SECONDS.values()), 0.0]
    )
    totals = logs[0].compute_totals()
    assert totals is not None
    assert [member["bytes_sent"] for member in totals.members] == [
        {"within": 0, "between": 14 / 3},
        {"within": 100, "between": 14 / 3},
    ]
    assert [
        (member["worker"], member["steps"], member["seconds"]) for member in totals.members
    ] == [(rank, 3, pytest.approx(SECONDS)) for rank in range(2)]


def test_totals_of_nothing(tmp_path: Path) -> None:
    logs, _ = job(tmp_path, 1)
    totals = logs[0].compute_totals()
    assert totals is not None
    assert (totals.steps, totals.samples_per_second, totals.final_loss, totals.rank_seconds) == (
        0,
        None,
        None,
        [],
    )


def test_metrics_that_cannot_be_written(tmp_path: Path) -> None:
    logs, where = job(tmp_path, 1)
    where.metrics.mkdir()
    logs[0].end_step(1, 1, SECONDS)
    with pytest.raises(
        ResourceError, match=r"metrics\.jsonl could not be written \(Is a directory\)"
    ):
        flush(logs)


def test_records_are_small() -> None:
    log = MetricsLog(None, say=silent)
    log.add_values(1, {"loss": 1.0})
    log.end_step(1, 4, SECONDS)
    assert len(log.drain()) < 100
    assert msgpack.unpackb(log.drain()) == [1, None, []]


def test_a_book_shows_what_it_writes(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = MetricsLog(
        MetricsWriter(folder(tmp_path), StatusLine(PlainLines(stream), clock=Clock())),
        say=silent,
        clock=Clock(),
    )
    log.total_steps = 4
    for step in (1, 2):
        log.add_values(step, {"loss": 3.0})
        log.end_step(step, 8, SECONDS)
    flush([log])
    log.close()
    assert [text.split("  ")[:2] for text in stream.getvalue().splitlines()] == [
        ["step 2/4", "loss 3"]
    ]


def trained(logs: list[MetricsLog], *steps: int) -> None:
    """Steps in which worker r logs the loss `10 step + r`, with weight 1."""
    for step in steps:
        for rank, log in enumerate(logs):
            log.add_values(step, {"loss": 10.0 * step + rank})
            log.end_step(step, 8, SECONDS)


@pytest.mark.parametrize("further", [False, True], ids=["lost at once", "lost two steps later"])
def test_another_start_goes_on_where_a_checkpoint_was_written_inside_of_a_step(
    tmp_path: Path, *, further: bool
) -> None:
    logs, where = job(tmp_path, 2)
    trained(logs, 1, 2)
    for rank, log in enumerate(logs):
        log.add_values(3, {"loss": torch.tensor(30.0 + rank)})
    bodies = [log.drain(waits=True) for log in logs]
    states = [json.loads(json.dumps(log.state_dict())) for log in logs]
    for log in logs:
        log.absorb(bodies)
    assert [line["step"] for line in lines(where)] == [1, 2]
    if further:
        for log in logs:
            log.end_step(3, 8, SECONDS)
        trained(logs, 4)
        flush(logs)
    again = [
        MetricsLog(MetricsWriter(where) if rank == 0 else None, say=silent, clock=Clock())
        for rank in range(2)
    ]
    for log, state in zip(again, states, strict=True):
        log.load_state_dict(state)
        log.rewind_to_step(3, 100.0)
    trained(again, 4, 5)
    flush(again)
    assert [(line["step"], line["loss"]) for line in lines(where)] == [
        (step, 10 * step + 0.5) for step in range(1, 6)
    ]
    assert lines(where)[-1]["time"] >= 100


def test_the_time_between_the_start_and_the_first_step_counts_once(tmp_path: Path) -> None:
    clock, where = Clock(), folder(tmp_path)
    log = MetricsLog(MetricsWriter(where), say=silent, clock=clock)
    clock.now += 50.0  # models are made and prepared
    log.rewind_to_step(0, 100.0)
    log.add_values(1, {"loss": 1.0})
    log.end_step(1, 8, SECONDS)
    log.absorb([log.drain(last=True)])
    assert [line["time"] for line in lines(where)] == [100.0]


def test_all_steps_are_handed_over_before_a_checkpoint(tmp_path: Path) -> None:
    where = folder(tmp_path)

    def body(group: ThreadGroup) -> int:
        log = MetricsLog(MetricsWriter(where) if group.rank == 0 else None, say=silent)
        for step in range(1, 4):
            log.add_values(step, {"loss": float(group.rank)})
            log.end_step(step, 8, SECONDS)
        log.hand_over(Agreement(group))
        return len(lines(where)) if group.rank == 0 else 3

    assert spawn(2, body) == [3, 3]
    assert [line["loss"] for line in lines(where)] == [0.5, 0.5, 0.5]
