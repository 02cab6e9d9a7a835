"""The best stays beside the newest, whatever comes later; all of it is read off the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.checkpoint.files import catalogue, checkpoint
from paceline.checkpoint.files.catalogue import (
    CheckpointEntry,
    find_direction,
    list_excess,
    rank_by_metric,
)
from paceline.checkpoint.files.manifest import Best, Metric
from paceline.errors import CheckpointError
from tests.harness.measured_checkpoints import names, save

NAN, INF = float("nan"), float("inf")


def entry(
    serial: int | None, value: float | None = None, best: Best = "min", *, newer: bool = False
) -> CheckpointEntry:
    """An entry whose step is ten times its serial."""
    step = 0 if serial is None else 10 * serial
    return CheckpointEntry(
        Path(f"step-{step:08d}"), serial, newer, None if value is None else Metric(value, best)
    )


@pytest.mark.parametrize(
    ("values", "best", "order"),
    [
        ([0.3, 0.2, 0.25], "min", [2, 3, 1]),
        ([0.3, 0.2, 0.25], "max", [1, 3, 2]),
        ([0.2, 0.2, 0.2], "min", [1, 2, 3]),  # the earlier of equals
        ([0.2, 0.2, 0.2], "max", [1, 2, 3]),
        ([NAN, INF, 0.2, -INF], "min", [3]),
        ([NAN, NAN], "max", []),
        ([None, 0.2, None], "min", [2]),
        ([0.0, -0.0], "min", [1, 2]),
    ],
)
def test_the_order(values: list[float | None], best: Best, order: list[int]) -> None:
    found = [entry(serial, value, best) for serial, value in enumerate(values, 1)]
    assert [each.serial for each in rank_by_metric(list(reversed(found)))] == order
    assert find_direction(found) == best


def test_the_last_metric_says_what_is_better() -> None:
    found = [entry(1, 0.9, "min"), entry(2, 0.1, "max"), entry(3, 0.2, "max"), entry(4)]
    assert find_direction(found) == "max" and [each.serial for each in rank_by_metric(found)] == [
        3,
        2,
    ]
    assert find_direction([entry(1), entry(None)]) is None and rank_by_metric([entry(1)]) == []


def test_what_has_to_go() -> None:
    found = [
        entry(1, 0.1),
        entry(2, 0.3),
        entry(3, NAN),
        entry(4),
        entry(5),
        entry(None),
        entry(9, newer=True),
    ]
    latest = Path("step-00000050")
    gone = [path.name for path in list_excess(found, latest, 2)]
    # neither the best, nor what is of a newer paceline
    assert gone == ["step-00000030", "step-00000020", "step-00000000"]
    assert [path.name for path in list_excess(found[:5], latest, 1)] == [
        "step-00000040",
        "step-00000030",
        "step-00000020",
    ]
    assert list_excess(found, latest, 9) == []


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for step, value in enumerate([0.5, 0.2, 0.4, NAN, 0.2, 0.3], 1):
        save(tmp_path, step, value, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    for step in (7, 8):
        save(tmp_path, step, keep=1)  # without a metric
    assert names(tmp_path) == ["step-00000002", "step-00000008"]
    assert (
        checkpoint.load_checkpoint(tmp_path, say=print).step == 8
        and checkpoint.load_checkpoint(tmp_path, say=print, best=True).step == 2
    )
    save(tmp_path, 9, 0.1, keep=1)
    assert names(tmp_path) == ["step-00000009"]


def test_a_best_that_is_damaged_gives_way_to_the_next(tmp_path: Path) -> None:
    for step, value in ((1, 0.3), (2, 0.1), (3, 0.2)):
        save(tmp_path, step, value)
    (tmp_path / "step-00000002" / "tensors.safetensors").write_bytes(b"")
    said: list[str] = []
    assert checkpoint.load_checkpoint(tmp_path, say=said.append, best=True).step == 3
    assert (
        len(said) == 1
        and said[0].startswith("step-00000002: tensors.safetensors has 0 bytes")
        and said[0].endswith("Using step-00000003, which is complete")
    )


@pytest.mark.parametrize("value", [None, NAN])
def test_no_best_is_said(tmp_path: Path, value: float | None) -> None:
    save(tmp_path, 1, value)
    with pytest.raises(
        CheckpointError,
        match=(
            r"none was saved with a metric that is a number. "
            r"Save with run.save\(metric=loss, best='min'\)"
        ),
    ):
        checkpoint.load_checkpoint(tmp_path, say=print, best=True)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*absent; save one first"):
        checkpoint.load_checkpoint(tmp_path / "absent", say=print, best=True)


def test_a_name_that_is_free(tmp_path: Path) -> None:
    assert catalogue.choose_free_path(tmp_path, 7).name == "step-00000007"
    (tmp_path / "step-00000007").symlink_to("nowhere")
    assert catalogue.choose_free_path(tmp_path, 7).name == "step-00000007.2"
