"""What more workers bring, by arithmetic on runs that are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.observe import scaling
from paceline.observe.scaling import ScalingPoint
from paceline.record.folder import RunFolder
from tests.harness.finished_runs import finished


def point(workers: int, batch: float = 32, steps: int = 90, **parts: float) -> ScalingPoint:
    return ScalingPoint(
        workers, batch, {"compute": 0.0, "exchange": 0.0, "wait": 0.0, "data": 0.0} | parts, steps
    )


ONE = point(1, compute=0.100)
TWO = point(2, compute=0.052, exchange=0.004, wait=0.002, data=0.002)  # 0.060
FOUR = point(4, compute=0.028, exchange=0.030, wait=0.004, data=0.002)  # 0.064


def test_losses_add_up_to_what_efficiency_lacks() -> None:
    found = scaling.make_scaling_curve([FOUR, ONE, TWO])
    assert found.strong and [each.workers for each in found.points] == [1, 2, 4]
    assert [found.speed_up_of(each) for each in found.points] == pytest.approx(
        [1, 0.100 / 0.060, 0.100 / 0.064]
    )
    assert [found.efficiency_of(each) for each in found.points] == pytest.approx(
        [1, 0.100 / 0.120, 0.100 / 0.256]
    )
    for each in found.points:
        assert sum(scaling.compute_losses(each, found.base).values()) == pytest.approx(
            1 - found.efficiency_of(each)
        )
    lost = scaling.compute_losses(FOUR, ONE)
    expected = {
        "exchange": 0.120 / 0.256,
        "wait": 0.016 / 0.256,
        "data": 0.008 / 0.256,
        "compute": (0.112 - 0.100) / 0.256,
    }
    assert lost == pytest.approx(expected)


def test_the_batch_tells_strong_from_weak() -> None:
    weak = scaling.make_scaling_curve(
        [point(2, 64, compute=0.1), point(6, 192, compute=0.1, wait=0.025)]
    )
    assert (
        not weak.strong
        and weak.speed_up_of(weak.points[1]) == pytest.approx(3 * 0.8)
        and weak.efficiency_of(weak.points[1]) == pytest.approx(0.8)
    )
    # the last batch of an epoch is smaller
    assert scaling.make_scaling_curve(
        [point(1, 32, compute=0.1), point(2, 31.9, compute=0.1)]
    ).strong
    with pytest.raises(
        UsageError,
        match=(
            "neither the same nor in proportion to the workers: 32 samples with 1, "
            "48 samples with 2"
        ),
    ):
        scaling.make_scaling_curve([ONE, point(2, 48, compute=0.1)])
    for few in ([ONE], [ONE, ONE], [ONE, TWO, TWO]):
        with pytest.raises(UsageError, match="two or more numbers of workers"):
            scaling.make_scaling_curve(few)


@pytest.mark.parametrize(("fixed", "divisible"), [(0.02, 0.08), (0.0, 0.1), (0.1, 0.0)])
def test_amdahls_fit_finds_what_does_not_shrink(fixed: float, divisible: float) -> None:
    runs = [point(workers, compute=fixed + divisible / workers) for workers in (1, 2, 4)]
    assert scaling.fit_serial_seconds(runs) == pytest.approx(fixed, abs=1e-9)
    said = scaling.describe_scaling(scaling.make_scaling_curve(runs))
    told = {
        0.02: "20.0 ms (20%) don't shrink (Amdahl's fit): more workers alone bring 5.0 times",
        0.0: "in proportion",
        0.1: "doesn't shrink with",
    }
    assert told[fixed] in said


def test_a_fit_is_never_below_nothing() -> None:
    assert scaling.fit_serial_seconds([point(1, compute=0.1), point(2, compute=0.04)]) == 0
    assert scaling.fit_serial_seconds(
        [point(1, compute=0.1), point(2, compute=0.2)]
    ) == pytest.approx(0.15)


def test_where_it_stops_paying() -> None:
    said = scaling.describe_conclusion(scaling.make_scaling_curve([ONE, TWO, FOUR]))
    assert (
        "stops paying at 2: from there to 4, each of 2 workers added is a loss: "
        "0.94 times the speed. Most was lost to exchange" in said
    )
    said = scaling.describe_conclusion(scaling.make_scaling_curve([ONE, TWO]))
    assert (
        "pays up to 2, the most that were measured: 1.67 times the speed. "
        "Most was lost to exchange (7% of the time of 2 workers)" in said
    )
    assert scaling.describe_conclusion(
        scaling.make_scaling_curve([ONE, point(2, compute=0.05)])
    ).endswith("2.00 times the speed, with next to nothing lost.")
    brings = scaling.describe_conclusion(
        scaling.make_scaling_curve([ONE, point(2, compute=0.05, wait=0.03)])
    )
    assert (
        "stops paying at 1: from there to 2, the worker added brings 25% of its worth. "
        "Most was lost to waiting"
        in brings
        and "shares" in brings
    )


def test_a_worker_pays_from_half_of_its_worth_on() -> None:
    just, hardly = (
        scaling.describe_conclusion(
            scaling.make_scaling_curve([point(1, compute=0.3), point(2, compute=0.2 + more)])
        )
        for more in (-0.001, 0.001)
    )
    assert "pays up to 2" in just and "stops paying at 1" in hardly


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("exchange", "a codec or LocalSGD"),
        ("wait", 'shares="auto"'),
        ("data", "num_workers"),
        ("compute", "8 samples for each worker"),
    ],
)
def test_the_reason_follows_what_was_lost(part: str, said: str) -> None:
    lost = point(4, **({"compute": 0.025} | {part: 0.1}))
    found = scaling.describe_conclusion(scaling.make_scaling_curve([ONE, lost]))
    assert (
        said in found
        and sum(word in found for word in ("a codec", "shares=", "num_workers", "samples for each"))
        == 1
    )


def test_workers_that_share_processors_are_told() -> None:
    runs = scaling.make_scaling_curve([ONE, point(4, compute=0.1)])
    assert "4 workers share 2 processors here; measure on more" in scaling.describe_conclusion(
        runs, 2
    )
    assert "share" not in scaling.describe_conclusion(
        runs, 4
    ) and "share" not in scaling.describe_conclusion(runs)
    weak = scaling.make_scaling_curve([ONE, point(4, 128, compute=0.3)])
    assert "beside more workers" in scaling.describe_conclusion(weak)


def test_table_and_picture() -> None:
    said = scaling.describe_scaling(scaling.make_scaling_curve([ONE, TWO, FOUR])).splitlines()
    assert said[0] == "Strong scaling: the same global batch."
    assert said[5].split() == [
        "4",
        "32",
        "64.0",
        "ms",
        "500",
        "1.56",
        "39%",
        "47%",
        "6%",
        "3%",
        "5%",
    ]
    bars = {line.split()[0]: line.split()[1] for line in said[7:10]}
    assert bars["1"] == "#" * 50 and len(bars["4"]) == 50
    assert {letter: bars["4"].count(letter) for letter in "#ewdr"} == {
        "#": 20,
        "e": 23,
        "w": 3,
        "d": 2,
        "r": 2,
    }


def test_a_run_that_gains_draws_within_its_line() -> None:
    said = scaling.describe_scaling(
        scaling.make_scaling_curve([ONE, point(2, compute=0.04, wait=0.005)])
    )
    assert (
        max(line.count("#") + line.count("w") for line in said.splitlines()[6:8]) <= 50
        and "111%" in said
    )


def test_few_steps_are_told() -> None:
    assert "Only 4 steps were measured with 2 workers" in scaling.describe_scaling(
        scaling.make_scaling_curve([ONE, point(2, steps=4, compute=0.05)])
    )


def test_the_run_of_median_speed_is_typical() -> None:
    runs = [point(1, compute=seconds) for seconds in (0.3, 0.1, 0.2)]
    assert (
        scaling.choose_median_run(runs).step_seconds == 0.2
        and scaling.choose_median_run(runs[:2]).step_seconds == 0.3
    )


def test_a_folder_is_read_without_its_first_steps(tmp_path: Path) -> None:
    usual = {"compute": 0.02, "exchange": 0.01, "wait": 0.005, "data": 0.005}
    folder = RunFolder(finished(tmp_path, steps=[{**usual, "compute": 9.0}] * 5 + [usual] * 30))
    found = scaling.measure_run(folder)
    assert (found.workers, found.batch, found.steps) == (
        2,
        64,
        30,
    ) and found.parts == pytest.approx(usual)
    lines = folder.metrics.read_text().splitlines()
    folder.metrics.write_text(
        "\n".join([*lines[:1], json.dumps({"step": 1, "time": 0.1, "loss": 1.0})]) + "\n"
    )
    with pytest.raises(UsageError, match="at least 2 with samples"):
        scaling.measure_run(folder)
    folder.summary.unlink()
    with pytest.raises(UsageError, match="has not ended"):
        scaling.measure_run(folder)
