"""The verdict is three sentences, the last of which says what most is to be gained by."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.facts import read_facts
from paceline.observe.verdict import NO_STEP, make_verdict
from paceline.record.folder import RunFolder
from tests.harness.finished_runs import finished


def test_a_quiet_run(tmp_path: Path) -> None:
    assert make_verdict(read_facts(RunFolder(finished(tmp_path)))) == [
        (
            "2 workers on 1 host trained 6,400 samples in 100 steps in 0:10, to a loss of 1.234, "
            "with AllReduce()."
        ),
        "A step took 100.0 ms (640 samples/s): compute 95%, exchange 3%, wait 1% and data 1%.",
        "Nothing stands out: 95% of a step is compute.",
    ]


def test_what_most_is_to_be_gained_by(tmp_path: Path) -> None:
    parts = {"compute": 0.05, "exchange": 0.04, "wait": 0.0, "data": 0.01}
    assert make_verdict(read_facts(RunFolder(finished(tmp_path, parts))))[-1] == (
        "Exchange takes 40% of a step; what `paceline report` advises saves about 20% of a step."
    )


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    assert make_verdict(read_facts(RunFolder(finished(tmp_path, loss=float("nan")))))[
        -1
    ].startswith("The loss is nan: the weights are likely lost")


def test_under_way_and_not_begun(tmp_path: Path) -> None:
    folder = RunFolder(finished(tmp_path))
    folder.summary.unlink()
    assert (
        make_verdict(read_facts(folder))[0]
        == "So far it has trained 6,400 samples in 100 steps in 0:10."
    )
    folder.metrics.write_text("")
    assert make_verdict(read_facts(folder)) == [NO_STEP]
