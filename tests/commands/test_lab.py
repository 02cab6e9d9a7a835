"""The commands of a lab: what reaches it, wherever the options stand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cluster import topology_file
from paceline.commands import lab
from paceline.errors import UsageError
from paceline.lab import terminal
from paceline.lab.running import LabRequest
from tests.harness.clusters import measured


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, LabRequest]]:
    """What the lab is asked for; it ends with 3."""
    found: list[tuple[str, str | None, LabRequest]] = []

    def run(cluster: str, placement: str | None, start: LabRequest, **_: Any) -> int:
        found.append((cluster, placement, start))
        return 3

    monkeypatch.setattr(terminal, "run_in_lab", run)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["--fault", "kill(rank=0)", "two-hosts", "--placement", "block", "train.py", "--sync", "x"],
        ["two-hosts", "--fault", "kill(rank=0)", "--placement", "block", "train.py", "--sync", "x"],
        ["--placement", "block", "--fault", "kill(rank=0)", "two-hosts", "train.py", "--sync", "x"],
    ],
)
def test_options_stand_before_and_after_the_cluster(
    words: Sequence[str], asked: list[tuple[str, str | None, LabRequest]]
) -> None:
    assert CliRunner().invoke(lab.app, ["run", *words]).exit_code == 3
    (cluster, placement, start) = asked[0]
    assert (cluster, placement, start.script, start.args) == (
        "two-hosts",
        "block",
        "train.py",
        ("--sync", "x"),
    )
    assert (list(start.faults), start.sync, start.show) == (["kill(rank=0)"], None, True)


def test_a_measured_cluster_reaches_all_hosts(
    tmp_path: Path, asked: list[tuple[str, str | None, LabRequest]]
) -> None:
    topology_file.write_topology(tmp_path / "cluster.json", measured({"host0": 1e8, "host1": 1e8}))
    words = ["run", "two-hosts", "--cluster", str(tmp_path / "cluster.json"), "train.py"]
    assert CliRunner().invoke(lab.app, words).exit_code == 3
    assert asked[0][2].environ == {"PACELINE_CLUSTER": str(tmp_path / "cluster.json")}
    refused = CliRunner().invoke(lab.app, [*words[:-1], "--min-workers", "1", "train.py"])
    assert isinstance(refused.exception, UsageError) and "--min-workers hosts change" in str(
        refused.exception
    )


def test_what_is_measured_is_checked_before_anything_is_built(tmp_path: Path) -> None:
    assert lab.make_probe_arguments("float32", tmp_path / "cluster.json", here=True) == (
        "--dtypes",
        "float32",
        "--out",
        str(tmp_path / "cluster.json"),
    )
    with pytest.raises(UsageError, match="'int8' can't be measured"):
        lab.make_probe_arguments("int8", tmp_path / "cluster.json", here=True)
    with pytest.raises(UsageError, match="nowhere"):
        lab.make_probe_arguments("float32", tmp_path / "nowhere" / "cluster.json", here=True)
    # another host writes it
    lab.make_probe_arguments("float32", tmp_path / "nowhere" / "cluster.json", here=False)
