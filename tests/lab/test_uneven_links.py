"""Hosts of which one has a slow link: it is measured at the start, said, and gets less to carry; replicas stay equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import lab
from tests.harness.jobs import PRELUDE

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.slow, pytest.mark.preloaded]

TRAINING = """
with pl.start(folder=sys.argv[1], name="run") as run:
    model, optimizer, loader = parts(run, nn.Sequential(nn.Linear(4, 4096), nn.Tanh(), nn.Linear(4096, 1)), samples=24, batch=8)
    for x, y in loader:
        step(run, model, optimizer, x, y)
    sums = run.group.gather_objects([float(p.double().sum()) for p in model.parameters()], name="sums")
    assert all(each == sums[0] for each in sums), sums
"""


def test_a_slow_link_is_measured_said_and_spared(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRELUDE + TRAINING)
    description = tmp_path / "slow.toml"
    hosts = "[[host]]\n" * 3 + 'bandwidth = "20mbit"\n'
    description.write_text(f'name = "slow"\n[all]\nworkers = 1\nbandwidth = "400mbit"\n{hosts}')
    with lab.cluster(description=str(description)) as cluster:
        ended = cluster.run(tmp_path / "script.py", str(tmp_path), folder=tmp_path, deadline=120, environ={"OMP_NUM_THREADS": "1"})
    assert ended.code == 0, ended.output
    route = json.loads((tmp_path / "run" / "summary.json").read_text())["route"]
    assert route.startswith("buckets travel by via='uneven': links carry ") and "times as fast as even chunks (links measured in" in route
    assert ended.output.count(route) == 1, "it is said once"
