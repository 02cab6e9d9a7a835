"""Hosts of which one has a slow link, as the file of a measured cluster says: it gets less to
carry, and replicas stay equal.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import lab
from paceline.cluster import topology_file
from tests.harness.clusters import measured
from tests.harness.jobs import PRELUDE

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.slow]

TRAINING = """
with pl.start(folder=sys.argv[1], name="run") as run:
    model, optimizer, loader = parts(run, nn.Sequential(nn.Linear(4, 4096), nn.Tanh(), nn.Linear(4096, 1)), samples=24, batch=8)
    before = run.group.traffic.between
    for x, y in loader:
        step(run, model, optimizer, x, y)
    sent = run.group.gather_objects(run.group.traffic.between - before, name="sent")
    sums = run.group.gather_objects([float(p.double().sum()) for p in model.parameters()], name="sums")
    assert all(each == sums[0] for each in sums), sums
    if run.is_first:
        run.results["sent"] = sent
"""  # noqa: E501


def test_a_slow_link_is_said_and_spared(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRELUDE + TRAINING)
    description = tmp_path / "slow.toml"
    hosts = "[[host]]\n" * 3 + 'bandwidth = "20mbit"\n'
    description.write_text(f'name = "slow"\n[all]\nworkers = 1\nbandwidth = "400mbit"\n{hosts}')
    topology_file.write_topology(
        tmp_path / "cluster.json", measured({"host0": 5e7, "host1": 5e7, "host2": 2.5e6})
    )
    environ = {"OMP_NUM_THREADS": "1", "PACELINE_CLUSTER": str(tmp_path / "cluster.json")}
    with lab.cluster(description=str(description)) as cluster:
        ended = cluster.run(
            tmp_path / "script.py", str(tmp_path), folder=tmp_path, deadline=120, environ=environ
        )
    assert ended.code == 0, ended.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    route, sent = summary["route"], summary["results"]["sent"]
    assert route["way"] == "uneven" and route["parts"] == pytest.approx([0.5, 0.5, 0.0]), route
    assert ended.output.count(route["why"]) == 1, "it is said once"
    assert sent[2] < 0.75 * min(sent[:2]), (
        "the host with the slow link sends its own gradients, and no sums"
    )
