"""`paceline bench scaling --lab`: each number of workers has the first hosts of the cluster, and
nothing is left of them.
"""

from __future__ import annotations

from pathlib import Path

from paceline.bench import scaling
from paceline.bench.scaling import ScalingRequest
from paceline.lab.description import make_regular
from tests.harness.jobs import PRELUDE

SCRIPT = """
with pl.start() as run:
    hosts = run._view.cluster.hosts
    assert len(hosts) == run.size, hosts
    if "--broken" in sys.argv and run.size == 2:
        raise RuntimeError("it broke here")
    model, optimizer, loader = parts(run, samples=80)
    for x, y in loader:
        step(run, model, optimizer, x, y)
"""


def test_hosts_are_as_many_as_workers_need(clean: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRELUDE + SCRIPT)
    shown, noted = list[str](), list[str]()
    asked = ScalingRequest(
        str(tmp_path / "train.py"), (), (1, 2), cluster=make_regular(2), folder=tmp_path / "kept"
    )
    assert scaling.measure_scaling(asked, shown.append, noted.append) == 0, noted
    assert len(shown) == 1 and "Strong scaling" in shown[0] and shown[0].count("Only 8 steps") == 1
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "1-strong-1",
        "2-strong-1",
    ]
    broken = ScalingRequest(
        str(tmp_path / "train.py"), ("--broken",), (1, 2), cluster=make_regular(2)
    )
    assert scaling.measure_scaling(broken, shown.append, noted.append) == 1 and len(shown) == 1
    assert (
        "RuntimeError: it broke here" in "\n".join(noted) and noted[-1] == "not measured: 2 workers"
    )
