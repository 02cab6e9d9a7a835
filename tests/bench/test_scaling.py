"""`paceline bench scaling`: its runs, what it refuses, and a script that is measured with one
worker and with two.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from paceline.bench import scaling
from paceline.bench.scaling import ScalingLaunch, ScalingRequest
from paceline.errors import UsageError
from paceline.lab.description import Description, Host, Rack, make_regular
from tests.harness.finished_runs import finished
from tests.harness.jobs import Jobs, wait_for

ASKED = ScalingRequest("train.py", ("--batch", "32", "-v"), (1, 2, 4), "both", "--batch")
SCRIPT = """
if "--broken" in sys.argv and os.environ["WORLD_SIZE"] == "2":
    raise RuntimeError("it broke here")
batch = int(sys.argv[sys.argv.index("--batch") + 1])
with pl.start(folder="elsewhere", name="mine") as run:
    model, optimizer, loader = parts(run, samples=100_000 * batch, batch=batch)
    for epoch in run.epochs(1000):
        for x, y in loader:
            step(run, model, optimizer, x, y)
            open("began", "w").close()
"""


def test_numbers() -> None:
    assert scaling.parse_worker_counts("4, 1,2,2") == (1, 2, 4)


@pytest.mark.parametrize("text", ["", "two", "1", "2,2", "0,1", "1,-2", "1,,2", "1.5,2", "1,²"])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"--workers .*two or more numbers"):
        scaling.parse_worker_counts(text)


def test_both_kinds_share_the_run_with_the_fewest_workers() -> None:
    assert scaling.plan_launches(ASKED) == [
        ScalingLaunch(1, ("--batch", "32", "-v"), ("strong", "weak")),
        ScalingLaunch(2, ("--batch", "32", "-v"), ("strong",)),
        ScalingLaunch(4, ("--batch", "32", "-v"), ("strong",)),
        ScalingLaunch(2, ("--batch", "64", "-v"), ("weak",)),
        ScalingLaunch(4, ("--batch", "128", "-v"), ("weak",)),
    ]


def test_a_batch_grows_from_that_of_the_fewest_workers() -> None:
    assert scaling.scale_batch(("--lr", "1", "--batch=32"), "--batch", 6, 4) == (
        "--lr",
        "1",
        "--batch=48",
    )
    for args, option, said in (
        (
            (),
            "--batch",
            "give the script the global batch for 2 workers, behind a --, as in -- --batch 32",
        ),
        (("--batch",), "--batch", "give the script"),
        (("--batch", "large"), "--batch", "give the script"),
        (("--batches", "32"), "--batch", "give the script"),
        (("--batch", "31"), "--batch", "a batch of 31 for 2 workers is no whole number for 3"),
        (
            ("--batch", "32"),
            None,
            "weak scaling needs an option of the script that sets the batch: give --batch-option",
        ),
    ):
        with pytest.raises(UsageError) as caught:
            scaling.scale_batch(args, option, 3, 2)
        assert said in str(caught.value)


def test_part_of_a_cluster() -> None:
    whole = Description(
        "c",
        (Host("a", 2), Host("b", 3), Host("d")),
        (Rack("left", ("a",)), Rack("right", ("b", "d"))),
    )
    assert [(host.name, host.workers) for host in scaling.take_first_hosts(whole, 4).hosts] == [
        ("a", 2),
        ("b", 2),
    ]
    assert [(rack.name, rack.hosts) for rack in scaling.take_first_hosts(whole, 4).racks] == [
        ("left", ("a",)),
        ("right", ("b",)),
    ]
    assert [rack.name for rack in scaling.take_first_hosts(whole, 1).racks] == [
        "left"
    ] and scaling.take_first_hosts(whole, 6) == whole
    with pytest.raises(UsageError, match="--workers 7: the cluster c has 6"):
        scaling.take_first_hosts(whole, 7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 0}, "--rounds 0: give more than 0"),
        ({"steps": -1}, "--steps -1: give more"),
        ({"seconds": float("nan")}, "--seconds nan: give more"),
        ({"kind": "strong"}, "--batch-option --batch is for weak scaling"),
        ({"sync": "AllReduc()"}, "AllReduce"),
        ({"cluster": make_regular(1, 2)}, "--workers 4: the cluster 1x2 has 2"),
        ({"script": "nothing.py"}, "nothing.py doesn't exist"),
        ({"folder": Path("full")}, "--folder full is not an empty folder"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    changes: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError) as caught:
        scaling.measure_scaling(
            ScalingRequest(**{**vars(ASKED), **changes}), pytest.fail, pytest.fail
        )  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_runs_that_are_there_are_compared(tmp_path: Path) -> None:
    alone = finished(
        tmp_path, {"compute": 0.1, "exchange": 0.0, "wait": 0.0, "data": 0.0}, workers=1
    )
    two = [
        finished(tmp_path, {"compute": 0.05, "exchange": more, "wait": 0.0, "data": 0.0})
        for more in (0.0, 0.03, 0.2)
    ]
    said = scaling.compare_runs([*two, alone])
    assert "Strong scaling" in said and "brings 25% of its worth. Most was lost to exchange" in said


def test_a_script_is_measured_with_one_worker_and_with_two(job: Jobs) -> None:
    words = [
        "bench",
        "scaling",
        job.write(SCRIPT),
        "--workers",
        "1,2",
        "--steps",
        "30",
        "--batch-option",
        "--batch",
        "--folder",
        "kept",
    ]
    ended = job.start([sys.executable, *job.launcher, *words, "--", "--batch", "4"]).end()
    assert ended.code == 0, ended.err
    strong, weak = ended.out.split("Weak scaling: the global batch grows with the workers.")
    assert strong.startswith("Strong scaling: the same global batch.\n")
    rows = [
        [
            line.split()[:2]
            for line in text.splitlines()
            if line.strip()[:1].isdecimal() and "#" not in line
        ]
        for text in (strong, weak)
    ]
    assert rows == [[["1", "4"], ["2", "4"]], [["1", "4"], ["2", "8"]]]
    assert all("pay" in text and "#" in text for text in (strong, weak))
    kept = sorted(
        str(path.parent.relative_to(job.folder)) for path in job.folder.glob("**/summary.json")
    )
    assert kept == ["kept/1-strong-weak-1/mine", "kept/2-strong-1/mine", "kept/2-weak-1/mine"]
    steps = [len((job.folder / path / "metrics.jsonl").read_text().splitlines()) for path in kept]
    assert all(30 <= count < 100_000 for count in steps)  # an epoch has as many


def test_what_fails_is_told_and_others_go_on(job: Jobs) -> None:
    words = [
        sys.executable,
        *job.launcher,
        "bench",
        "scaling",
        job.write(SCRIPT),
        "--workers",
        "1,2",
        "--steps",
        "5",
        "--",
        "--batch",
        "4",
    ]
    broken = job.start([*words, "--broken"]).end()
    assert broken.code == 1 and broken.out == ""
    assert (
        "paceline: 2 workers: the script ended with exit code 1; its last lines:" in broken.err
        and "RuntimeError: it broke here" in broken.err
    )
    assert broken.err.splitlines()[-1] == "paceline: not measured: 2 workers"


def test_a_script_without_a_run(job: Jobs) -> None:
    script = job.folder / "plain.py"
    script.write_text("print('nothing')")
    ended = job.start(
        [sys.executable, *job.launcher, "bench", "scaling", "plain.py", "--workers", "1,2"]
    ).end()
    assert (
        ended.code == 1
        and "1 worker: the script made no run" in ended.err
        and "not measured: 1 worker, 2 workers" in ended.err
    )


def test_ctrl_c_ends_it_all(job: Jobs) -> None:
    words = [
        "bench",
        "scaling",
        job.write(SCRIPT),
        "--workers",
        "1,2",
        "--steps",
        "1000000000",
        "--seconds",
        "100000",
    ]
    started = job.start([sys.executable, *job.launcher, *words, "--", "--batch", "4"])
    wait_for((job.folder / "began").exists)
    started.process.send_signal(signal.SIGINT)
    ended = started.end()
    assert ended.code == 130 and ended.out == "", ended.err
