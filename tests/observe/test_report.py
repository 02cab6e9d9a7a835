"""The report says where the time went, what to do about it, and what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.observe.report import format_report
from paceline.record.folder import RunFolder, RunSummary, RunTotals
from paceline.record.live import LiveRecord
from paceline.record.log import MetricsLog
from paceline.record.writer import MetricsWriter
from tests.harness.finished_runs import QUIET, finished
from tests.harness.live_runs import facts


def split(**parts: float) -> dict[str, float]:
    """Parts in seconds; what is left of 0.1 s is compute."""
    return {"compute": 0.1 - sum(parts.values()), "exchange": 0.0, "wait": 0.0, "data": 0.0} | parts


def test_a_quiet_run(tmp_path: Path) -> None:
    assert format_report(finished(tmp_path)) == (
        "run: AllReduce(), 2 workers on 1 host, 100 steps of 6,400 samples in all in 0:10; "
        "final loss 1.234\n"
        "\n"
        "A step took 100.0 ms (640 samples/s), mean over steps and workers:\n"
        "  compute    95%    95.0 ms  forward, backward and the optimizer\n"
        "  exchange    3%     3.0 ms  what could not be hidden behind compute\n"
        "  wait        1%     1.0 ms  for slower workers\n"
        "  data        1%     1.0 ms  for the next batch\n"
        "\n"
        "All workers together sent 7.5 MB within hosts and 0 "
        "bytes between hosts in a step.\n\n"
        "Nothing stands out: 95% of a step is compute."
    )


@pytest.mark.parametrize(
    ("counted", "words", "advice"),
    [
        (
            (1, 0.05, 0.4),
            (
                "1 checkpoint: training stood still for 50.0 ms, and it was on the disk after "
                "400.0 ms of writing."
            ),
            "",
        ),
        (
            (4, 0.1, 2.0),
            (
                "4 checkpoints: training stood still for 25.0 ms each, and they were on the disk "
                "after 500.0 ms of writing each."
            ),
            "",
        ),
        (
            (
                1,
                0.05,
                0.4,
                {"checkpoint": "step-00000003", "step": 3, "metric": 0.25, "best": "min"},
            ),
            (
                "on the disk after 400.0 ms of writing. The best is step-00000003, "
                "with a metric of 0.25."
            ),
            "",
        ),
        (
            (4, 2.0, 1.8),
            "4 checkpoints",
            "Checkpoints took 20% of the run: run.save(background=True) writes them",
        ),
        (
            (9, 1.0, 9.0),
            "9 checkpoints",
            "Training stood still for checkpoints for 10% of the run: save less often",
        ),
    ],
)
def test_checkpoints(tmp_path: Path, counted: tuple[Any, ...], words: str, advice: str) -> None:
    saved = dict(zip(("count", "stall_seconds", "write_seconds", "best"), counted, strict=False))
    text = format_report(finished(tmp_path, seconds=10.0, checkpoints=saved))
    assert words in text
    assert advice in text if advice else "Nothing stands out" in text


@pytest.mark.parametrize(
    ("sync", "hosts", "words"),
    [
        ("AllReduce()", 1, "A larger global batch"),
        (
            "AllReduce()",
            2,
            (
                "One copy per host is sent already. AllReduce(codec='auto') sends fewer bits of it "
                "where that pays"
            ),
        ),
        (
            "AllReduce(codec=int8())",
            2,
            "One copy per host is sent already. `paceline bench collectives` says",
        ),
        ("AllReduce(via='ring')", 2, "AllReduce(via='hierarchical') send one copy per host"),
        ("AllReduce(via='hierarchical')", 2, "One copy per host is sent already"),
        ("AllReduce(via='tree')", 1, "AllReduce() goes through shared memory"),
    ],
)
def test_an_exposed_exchange(tmp_path: Path, sync: str, hosts: int, words: str) -> None:
    text = format_report(
        finished(
            tmp_path,
            split(exchange=0.04),
            sync=sync,
            hosts=hosts,
            bytes_sent={"within": 1e6, "between": 2e6 * (hosts > 1)},
        )
    )
    assert "Exchange takes 40% of a step" in text
    assert words in text
    assert ("200 Mbit/s out of each host" in text) == (hosts == 2)


MESH = {
    "workers": 4,
    "mesh": {"data": 2, "tensor": 2},
    "places": [
        {"data": 0, "tensor": 0},
        {"data": 1, "tensor": 0},
        {"data": 0, "tensor": 1},
        {"data": 1, "tensor": 1},
    ],
}


def along(data: float, tensor: float, between: float = 0.0) -> dict[str, dict[str, float]]:
    axes = {"data": (data, 1e6, 2e6), "tensor": (tensor, 5e6, between)}
    return {
        axis: dict(zip(("seconds", "within", "between"), found, strict=True))
        for axis, found in axes.items()
    }


def test_axes_of_a_cut_model(tmp_path: Path) -> None:
    text = format_report(finished(tmp_path, axes=along(0.003, 0.02), **MESH))
    assert text.startswith("run: AllReduce(), mesh data=2, tensor=2, 4 workers on 1 host, ")
    assert (
        "Along the axes of the mesh, waits for others included; "
        "bytes are those of all workers in a step:\n"
        "  data        3%     3.0 ms  1.0 MB within hosts, 2.0 MB between hosts\n"
        "  tensor     20%    20.0 ms  5.0 MB within hosts, 0 bytes between hosts\n"
    ) in text


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (along(0.03, 0.01), "A larger global batch makes fewer exchanges"),
        (
            along(0.01, 0.03),
            (
                "Exchange takes 40% of a step, most of it along `tensor`: "
                "fewer workers along it exchange less"
            ),
        ),
        (
            along(0.01, 0.03, between=1e6),
            "along `tensor`, which goes between hosts: give the mesh fewer workers along it",
        ),
    ],
)
def test_an_exposed_exchange_has_the_advice_of_its_axis(
    tmp_path: Path, axes: dict[str, dict[str, float]], words: str
) -> None:
    text = format_report(finished(tmp_path, split(exchange=0.04), axes=axes, **MESH))
    assert words in text and text.count("Exchange takes") == 1


def holding(parameters: int, optimizer: int | None, peak: int) -> dict[str, object]:
    measured = {"parameters": parameters, "gradients": parameters, "optimizer": 2 * parameters}
    return {
        "predicted": {"parameters": 10**6, "gradients": parameters, "optimizer": optimizer},
        "measured": measured,
        "peak": peak,
    }


def test_what_workers_hold(tmp_path: Path) -> None:
    memory = [
        holding(10**6, 2 * 10**6, 3 * 10**8),
        holding(2 * 10**6, None, 10**8),
        *[holding(10**6, 2 * 10**6, 4 * 10**8)] * 2,
    ]
    text = format_report(finished(tmp_path, memory=memory[:2], workers=2))
    assert (
        "Held by each worker from step to step (in brackets what was predicted, where that is "
        "something else):\n"
        "               parameters  gradients  optimizer  process at most\n"
        "  rank 0           1.0 MB     1.0 MB     2.0 MB         300.0 MB\n"
        "  rank 1  2.0 MB (1.0 MB)     2.0 MB     4.0 MB         100.0 MB\n"
    ) in text
    text = format_report(finished(tmp_path / "other", memory=memory, **MESH))
    assert (
        "  ranks 0, 2, 3  " in text
        and "  rank 1 (data 1, tensor 0)  " in text
        and " 400.0 MB\n" in text
    )
    text = format_report(
        finished(tmp_path / "third", memory=[memory[0], memory[1], memory[0], memory[1]], **MESH)
    )
    assert "  ranks 0, 2 (data 0)  " in text and "  ranks 1, 3 (data 1)  " in text
    assert "  all workers  " in format_report(
        finished(tmp_path / "all", memory=memory[2:], workers=2)
    )


def works(*seconds: float, late: tuple[float, ...]) -> list[dict[str, float]]:
    return [{"seconds": mine, "late": share} for mine, share in zip(seconds, late, strict=True)]


def test_a_slow_worker_is_named_with_shares_that_fit(tmp_path: Path) -> None:
    work = works(0.05, 0.1, 0.06, late=(0.0, 0.97, 0.3))
    text = format_report(finished(tmp_path, split(wait=0.03), work=work, workers=3))
    assert (
        "Waiting for slower workers takes 30% of a step. The slowest is rank 1, "
        "with 100.0 ms of own work" in text
    )
    assert "where the median is 60.0 ms" in text
    assert "prepare(..., shares='auto'), or shares=[1, 0.5, 0.83]" in text


def test_a_slow_worker_of_a_mesh_has_its_place_and_shares_go_by_samples(tmp_path: Path) -> None:
    """Ranks 0 and 2 have the same samples, and so have 1 and 3."""
    work = works(0.05, 0.1, 0.06, 0.05, late=(0.0, 0.97, 0.3, 0.0))
    text = format_report(finished(tmp_path, split(wait=0.03), work=work, **MESH))
    assert (
        "The slowest is rank 1 (data 1, tensor 0), with" in text
        and "prepare(..., shares='auto'), or shares=[1, 0.6]" in text
    )


LATE = [
    {"compute": 0.001, "reading": 0.0, "collection": 0.0, "stolen": 0.0, "paging": 0.0},
    {"compute": 0.002, "reading": 0.04, "collection": 0.00001, "stolen": 0.008, "paging": 0.0},
]


def test_who_was_late_and_why(tmp_path: Path) -> None:
    work = works(0.05, 0.1, late=(0.0, 1.0))
    text = format_report(finished(tmp_path, split(wait=0.03), work=work, late=LATE))
    assert (
        "How much later than usual each worker was in a mean step, and why:\n"
        "             late  compute  data loading  stolen processor\n"
        "  rank 0   1.0 ms   1.0 ms        0.0 ms            0.0 ms\n"
        "  rank 1  50.0 ms   2.0 ms       40.0 ms            8.0 ms\n\n"
    ) in text
    assert (
        "where the median is 75.0 ms, for data loading. Let other processes prepare its batches"
        in text
        and "shares=[" not in text
    )


def test_what_could_not_be_told_apart_is_said(tmp_path: Path) -> None:
    text = format_report(finished(tmp_path, split(wait=0.03), late=LATE, untold=["stolen"]))
    assert "Not told apart on this machine: stolen processor." in text


def test_those_who_were_hardly_late_have_no_table(tmp_path: Path) -> None:
    assert "later than usual" not in format_report(finished(tmp_path, late=[LATE[0], LATE[0]]))


def test_shares_that_are_unequal_already_are_gone_on_from(tmp_path: Path) -> None:
    work, loader = works(0.05, 0.1, late=(0.0, 1.0)), {"num_workers": 0, "shares": [48, 16]}
    text = format_report(finished(tmp_path, split(wait=0.03), work=work, loader=loader))
    assert "the shares are 48, 16 now, and by speed they would be shares=[1, 0.17]" in text


def test_a_worker_that_is_slower_only_now_and_then_gets_no_shares(tmp_path: Path) -> None:
    text = format_report(
        finished(tmp_path, split(wait=0.03), work=works(0.05, 0.1, late=(0.2, 0.6)))
    )
    assert "no worker is the slowest throughout" in text and "shares" not in text


def test_waiting_without_a_slowest(tmp_path: Path) -> None:
    text = format_report(
        finished(tmp_path, split(wait=0.03), work=works(0.07, 0.07, late=(0.1, 0.1)))
    )
    assert "no worker is the slowest throughout" in text
    assert "trace.json" in text


def test_slow_data(tmp_path: Path) -> None:
    assert (
        "waited for during 25% of a step. Where cores are left, let others prepare it: "
        "DataLoader(..., num_workers=2" in format_report(finished(tmp_path, split(data=0.025)))
    )


@pytest.mark.parametrize(
    ("readers", "seconds", "words"),
    [
        (2, 0.0015, "see whether num_workers=0 is faster"),  # what two readers cost a step of 3 ms
        (
            2,
            0.005,
            (
                "with num_workers=2 for each worker. Such processes need a few milliseconds to "
                "hand a batch over: see whether num_workers=0"
            ),
        ),
        (
            4,
            0.015,
            "with num_workers=4 for each worker. More of them help only where cores are left",
        ),
    ],
)
def test_readers_that_there_are_already_are_not_advised(
    tmp_path: Path, readers: int, seconds: float, words: str
) -> None:
    parts = {"compute": 2 * seconds, "exchange": 0.0, "wait": 0.0, "data": seconds}
    text = format_report(
        finished(tmp_path, parts, loader={"num_workers": readers, "shares": [32, 32]})
    )
    assert words in text and "num_workers=2 or more" not in text


# Advice from noise
# --------------------------------------------------------------------------------------------------

LARGE = {"exchange": split(exchange=0.04), "wait": split(wait=0.03), "data": split(data=0.03)}
SLOWER = works(0.05, 0.1, late=(0.0, 1.0))  # what the wait would be put down to


def some(often: int, parts: dict[str, float]) -> list[dict[str, float]]:
    """A hundred steps: of every ten in a row, taken together, so many tenths of the run have
    `parts` and the others are quiet.
    """
    return [parts if number // 10 < often else QUIET for number in range(100)]


@pytest.mark.parametrize("part", LARGE)
def test_what_lasts_gets_advice(tmp_path: Path, part: str) -> None:
    assert "What to do about it" in format_report(finished(tmp_path, LARGE[part], work=SLOWER))


@pytest.mark.parametrize("part", LARGE)
def test_few_steps_get_no_advice(tmp_path: Path, part: str) -> None:
    text = format_report(finished(tmp_path, steps=[LARGE[part]] * 10, work=SLOWER))
    assert "10 steps are too few to tell a rule from chance: from 25 on there is advice." in text
    assert "shares=" not in text and "What to do" not in text


@pytest.mark.parametrize("part", LARGE)
def test_what_comes_and_goes_gets_no_advice(tmp_path: Path, part: str) -> None:
    steps = some(6, LARGE[part])
    # on the mean it is large
    assert sum(step[part] for step in steps) > 0.15 * sum(sum(step.values()) for step in steps)
    text = format_report(finished(tmp_path, steps=steps, work=SLOWER))
    assert "What to do" not in text and ("stands out" in text or "comes and goes" in text)
    assert "What to do" in format_report(
        finished(tmp_path / "more", steps=some(9, LARGE[part]), work=SLOWER)
    )


@pytest.mark.parametrize("part", LARGE)
def test_the_first_steps_are_no_advice(tmp_path: Path, part: str) -> None:
    steps = [{name: 20 * seconds for name, seconds in LARGE[part].items()}] * 5 + [QUIET] * 40
    assert sum(step[part] for step in steps) > 0.2 * sum(sum(step.values()) for step in steps)
    assert "What to do" not in format_report(finished(tmp_path, steps=steps, work=SLOWER))


@pytest.mark.parametrize("part", LARGE)
def test_what_is_short_gets_no_advice(tmp_path: Path, part: str) -> None:
    """A step of 1.2 ms, a third of which is not compute, as that of examples/train.py."""
    parts = {"compute": 0.0008, "exchange": 0.0, "wait": 0.0, "data": 0.0} | {part: 0.0004}
    assert "Nothing to gain for sure" in format_report(
        finished(tmp_path, parts, work=works(0.0006, 0.0012, late=(0.0, 1.0)))
    )


def test_a_short_stop_for_a_checkpoint_is_no_advice(tmp_path: Path) -> None:
    saved = {"count": 2, "stall_seconds": 0.4, "write_seconds": 0.4}
    assert "What to do" not in format_report(finished(tmp_path, seconds=5.0, checkpoints=saved))


def test_saving_in_the_background_is_not_advised_where_it_is_done(tmp_path: Path) -> None:
    saved = {"count": 4, "stall_seconds": 2.0, "write_seconds": 1.8, "background": 4}
    text = format_report(finished(tmp_path, seconds=10.0, checkpoints=saved))
    assert "save less often" in text and "background=True" not in text


def test_busy_servers_get_advice_after_enough_steps_only(tmp_path: Path) -> None:
    server = {"busy_seconds": 9.0, "bytes": 1, "bytes_sent": 1, "memory_bytes": 1, "put_off": 0}
    assert "--servers N" in format_report(
        finished(tmp_path / "long", seconds=10.0, servers=[server])
    )
    assert "--servers N" not in format_report(
        finished(tmp_path / "short", seconds=10.0, steps=[QUIET] * 10, servers=[server])
    )


def test_without_the_time_of_each_step_there_is_no_advice(tmp_path: Path) -> None:
    folder = finished(tmp_path, LARGE["data"])
    (folder / "metrics.jsonl").unlink()
    assert "metrics.jsonl is missing" in format_report(folder)


def test_time_outside_of_steps(tmp_path: Path) -> None:
    assert "Outside of steps: 0:10, 50% of the run" in format_report(
        finished(tmp_path, seconds=20.0)
    )
    assert "Only 8% of the run was spent in steps" in format_report(
        finished(tmp_path, seconds=120.0)
    )
    assert "Only" not in format_report(finished(tmp_path, seconds=20.0))
    assert "Outside" not in format_report(finished(tmp_path))


def test_events(tmp_path: Path) -> None:
    text = format_report(
        finished(
            tmp_path,
            events=[
                {"time": 62.0, "what": "rank 1 on B was lost"},
                {"time": 63.5, "what": "resumed", "more": 1},
            ],
        )
    )
    assert text.endswith("Events:\n     1:02  rank 1 on B was lost\n     1:04  resumed")


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    assert "final loss nan" in format_report(finished(tmp_path, loss=float("nan")))
    assert "loss" not in format_report(finished(tmp_path, loss=None))


def test_one_worker_sends_nothing(tmp_path: Path) -> None:
    text = format_report(finished(tmp_path, workers=1))
    assert "sent" not in text
    assert "mean over steps:" in text


# Unfinished and damaged
# --------------------------------------------------------------------------------------------------


def unfinished(tmp_path: Path, steps: int = 3) -> RunFolder:
    folder = RunFolder.create_folder(tmp_path, "run", say=lambda text: None)
    log = MetricsLog(MetricsWriter(folder), say=lambda text: None)
    for step in range(1, steps + 1):
        log.add_values(step, {"loss": float(step)})
        log.end_step(step, 10, split(data=0.03))
    log.absorb([log.drain()])
    log.close()
    return folder


def test_a_run_that_has_not_ended(tmp_path: Path) -> None:
    folder = unfinished(tmp_path, 30)
    with folder.metrics.open("a") as file:
        file.write('{"step": 31, "lo')  # being written
    text = format_report(folder.path)
    assert text.startswith(
        "run has not ended (no summary.json): it is still running, or was broken off. So far: "
        "30 steps of 300 samples"
    )
    assert "last loss 30" in text
    assert "data       30%    30.0 ms" in text
    assert "waited for during 30%" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "run failed at step 27: ValueError: no. So far: 30 steps"),
        ({}, "run is running, at step 27. So far: 30 steps"),
        (
            {"born": "another"},
            "run was broken off at step 27: the process that wrote its folder is gone. So far",
        ),
        (
            {"machine": "another"},
            "run has not ended (no summary.json): it is still running, or was broken off. So far",
        ),
        ({"step": "x"}, "run has not ended"),
    ],
)
def test_how_a_run_without_a_summary_stands(
    tmp_path: Path, change: dict[str, Any] | None, words: str
) -> None:
    folder = unfinished(tmp_path, 30)
    record = LiveRecord(folder, lambda: True, lambda: facts(live={"step": 27}), print)
    if change is None:
        record.record_failure(ValueError, ValueError("no"))
    else:
        record.update_file()
        found = json.loads(folder.live.read_text())
        found["live"]["writer"] |= change
        found["live"] |= {"time": 0.0} | ({"step": "x"} if "step" in change else {})
        folder.live.write_text(json.dumps(found))
    assert format_report(folder.path).startswith(words)


def test_what_a_codec_gained_is_told(tmp_path: Path) -> None:
    words = "int8() sent 1 MB a step where exact sums would have sent 4 MB; it paid."
    assert f"in a step.\n\n{words}\n\nNothing" in format_report(
        finished(tmp_path, codecs=[{"words": words}])
    )


def test_a_run_without_steps(tmp_path: Path) -> None:
    folder = RunFolder.create_folder(tmp_path, "run", say=lambda text: None)
    assert format_report(folder.path).endswith(
        "No step was finished, so there is nothing to tell about time."
    )
    folder.metrics.write_text("")
    assert "No step was finished" in format_report(folder.path)
    totals = RunTotals(0, 0, 1.0, None, None, split(compute=0.0), [])
    RunSummary(
        "AllReduce()", 1, 1, totals, {"within": 0.0, "between": 0.0}, [], "00", {}, []
    ).write(folder)
    assert "No step was finished" in format_report(folder.path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no run folder .*rnu; .* holds no runs"):
        format_report(tmp_path / "rnu")
    unfinished(tmp_path)
    with pytest.raises(UsageError, match=r"there is no run folder .*rnu; runs in .*: run$"):
        format_report(tmp_path / "rnu")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    folder = unfinished(tmp_path)
    with pytest.raises(UsageError, match=r"metrics\.jsonl is a file: give the folder of a run"):
        format_report(folder.metrics)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    unfinished(tmp_path)
    with pytest.raises(
        UsageError,
        match=r"is not a run folder: it has neither .* it holds the runs run: name one of them",
    ):
        format_report(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "lacks 'steps'"),
        ('{"steps": "x"}', "is damaged"),
    ],
)
def test_a_damaged_summary(tmp_path: Path, text: str, words: str) -> None:
    folder = unfinished(tmp_path)
    folder.summary.write_text(text)
    with pytest.raises(UsageError, match=rf"summary\.json {words}"):
        format_report(folder.path)


def test_damaged_metrics(tmp_path: Path) -> None:
    folder = unfinished(tmp_path)
    folder.metrics.write_text("nonsense\n" + folder.metrics.read_text())
    with pytest.raises(UsageError, match=r"metrics\.jsonl is damaged in line 1"):
        format_report(folder.path)
    folder.metrics.write_text(json.dumps({"step": 1, "seconds": 3}) + "\n")
    with pytest.raises(UsageError, match="is not of this version"):
        format_report(folder.path)


@pytest.mark.jobs
def test_reporting_needs_no_torch() -> None:
    check = "import sys, paceline.observe.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
