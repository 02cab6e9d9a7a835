"""A mesh of real processes, on one host and on two: what the command line says is what the run
has, and it ends as it should.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.jobs import Jobs

BODY = """
from tests.harness.cuts import columns

with pl.start(name="cut") as run:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(run.rank)                              # the first worker's values are everybody's
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    cut = [columns()] if "tensor" in run.mesh.names else []
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = TensorDataset(torch.randn(43, 4, generator=torch.Generator().manual_seed(1)), torch.ones(43, 1))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True), cut=cut)
    for _ in run.epochs(2):
        for x, y in loader:
            step(run, model, optimizer, x, y)
    print(json.dumps([run.rank, run.mesh.coordinates(run.rank), len(x)]), flush=True)
"""  # noqa: E501


def test_what_the_command_line_says_is_what_the_run_has(job: Jobs, tmp_path: Path) -> None:
    ended = job.run("import json\n" + BODY, 4, "--mesh", "data, tensor=2").end()
    assert ended.code == 0, ended.err
    assert "mesh data=2, tensor=2, AllReduce(), global batch 8 = 2 x 4" in ended.err
    one = job.run("import json\n" + BODY.replace('name="cut"', 'name="one"'), 1).end()
    assert one.code == 0, one.err
    cut, alone = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        for name in ("cut", "one")
    )
    assert (cut["samples"], cut["steps"]) == (alone["samples"], alone["steps"]) == (86, 12)
    assert cut["final_loss"] == pytest.approx(alone["final_loss"], rel=1e-9)


def test_cuts_of_the_command_line_are_those_of_the_run(job: Jobs, tmp_path: Path) -> None:
    body = BODY.replace(
        'cut = [columns()] if "tensor" in run.mesh.names else []', "cut = None"
    ).replace('name="cut"', "name=sys.argv[1]")
    cut = """tensor({"0": column(), "2": row()}), shard("0", zero=2)"""
    ended = job.run(
        "import json\n" + body, 4, "--mesh", "shard=2, tensor=2", "--cut", cut, args=("cut",)
    ).end()
    assert ended.code == 0, ended.err
    one = job.run("import json\n" + body, 1, args=("one",)).end()
    assert one.code == 0, one.err
    found, alone = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        for name in ("cut", "one")
    )
    assert found["final_loss"] == pytest.approx(alone["final_loss"], rel=1e-9)
    assert (found["events"], job.left()) == ([], [])
    assert found["mesh"] == {"shard": 2, "tensor": 2} and found["places"][3] == {
        "shard": 1,
        "tensor": 1,
    }
    for axis in ("shard", "tensor"):
        assert (
            found["axes"][axis]["seconds"] > 0
            and 0 < found["axes"][axis]["within"] < found["bytes_sent"]["within"]
        ), axis


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ("--mesh", "data=2, tensor=3"),
            (
                "mesh='data=2, tensor=3' doesn't fit 2 workers; these fit: data=1, tensor=2 | "
                "data=2, tensor=1"
            ),
        ),
        (
            ("--mesh", "tensor", "--min-workers", "1"),
            "mesh='tensor' with --min-workers: a worker of a cut model has parts that no other",
        ),
        (
            ("--mesh", "stage"),
            "the mesh (stage=2) has the axis `stage`, and no model is cut along it",
        ),
        (
            ("--mesh", "shard"),
            "the mesh (shard=2) has the axis `shard`, and no model is cut along it",
        ),
    ],
    ids=["fit", "lost", "stage", "unused"],
)
def test_what_cannot_be_had_is_said_and_nothing_is_left(
    job: Jobs, options: tuple[str, ...], why: str
) -> None:
    ended = job.run("import json\n" + BODY, 2, *options).end()
    assert ended.code != 0 and why in ended.err
    assert job.left() == []


@pytest.mark.parametrize(
    ("mesh", "cut"), [("data=2, shard=2", "shard('*', zero=3)"), ("shard", "shard(zero=2)")]
)
def test_the_state_of_a_model_is_shared_out_between_processes(
    job: Jobs, tmp_path: Path, mesh: str, cut: str
) -> None:
    ended = job.run("import json\n" + BODY, 4, "--mesh", mesh, "--cut", cut).end()
    assert ended.code == 0, ended.err
    one = job.run("import json\n" + BODY.replace('name="cut"', 'name="one"'), 1).end()
    assert one.code == 0, one.err
    found, alone = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        for name in ("cut", "one")
    )
    assert (found["samples"], found["steps"]) == (86, 12)
    assert found["final_loss"] == pytest.approx(alone["final_loss"], rel=1e-9)
    assert job.left() == []
