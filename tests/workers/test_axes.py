"""A run by a mesh: each slice trains on the same samples, and counts them once; all of it equals
one worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline as pl
from paceline.cluster.mesh import Mesh, lay_out_mesh
from paceline.cluster.topology import HostRanks, Topology
from paceline.comm.agreement import Agreement
from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from paceline.parallel.shard import shard
from paceline.parallel.tensor.styles import column, row
from paceline.parallel.tensor.tensor_cut import tensor
from paceline.session.run import Run
from paceline.sync.context import SyncContext
from paceline.workers.axes import RunAxes
from tests.harness.cuts import columns, network, summed
from tests.harness.runs import Numbered, alone, batches, distance, parameters, workers
from tests.harness.thread_groups import spawn

LINEARS = tensor({"0": column(), "2": row()})
UNCOMPARED = replace(LINEARS, compare=False)
ONE_HOST = Topology((HostRanks("here", (0, 1), "127.0.0.1"),))


def whole(run: Run, model: nn.Module) -> Tensor:
    """All parameters as one vector, cut ones put together."""
    group, found = run._axes.groups.group_along("tensor"), []
    for parameter in model.parameters():
        axes = run._prepared.cuts.placements.placement_of(parameter).axes
        parts = (
            group.all_gather(parameter.detach().contiguous(), name="parameter").wait()
            if "tensor" in axes
            else [parameter.detach()]
        )
        found.append(torch.cat(parts).reshape(-1))
    return torch.cat(found)


def train(
    *cuts: Any, epochs: int = 2, **options: Any
) -> Callable[[Run], tuple[Tensor, list[float]]]:
    """Train some epochs of an uneven number of batches; return the parameters, and means of an
    evaluation of 21 samples.
    """

    def body(run: Run) -> tuple[Tensor, list[float]]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, loader = run.prepare(
            model, optimizer, batches(43, 8), cut=list(cuts), **options
        )
        evaluation = run.prepare(DataLoader(Numbered(21), batch_size=4), train=False)
        means = []
        for _ in run.epochs(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
            with torch.no_grad():
                rows = torch.cat([run.gather(model(x)[:, 0]) for x, _ in evaluation])
                means += [
                    float(rows.sum()),
                    float(len(rows)),
                    run.mean(float(run._context.group.rank), weight=1.0),
                ]
        return whole(run, model), means

    return body


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "test" / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("shares", [None, [3, 1]], ids=["even", "3 to 1"])
def test_two_replicas_of_two_workers_train_as_one_worker_does(
    tmp_path: Path, shares: list[int] | None
) -> None:
    cut = workers(
        4, train(columns(), shares=shares), mesh="data=2, tensor=2", folder=tmp_path / "cut"
    )
    (one, means), *_ = workers(1, train(), folder=tmp_path / "one")
    assert max(distance(found, one) for found, _ in cut) < 1e-12
    for _, found in cut:
        assert found[1::3] == means[1::3] == [21.0, 21.0]
        assert found[2::3] == [0.5, 0.5]  # ranks 0 and 1 of the slice
        assert found[0::3] == pytest.approx(means[0::3], rel=1e-12)
    mine, theirs = lines(tmp_path / "cut"), lines(tmp_path / "one")
    assert (
        [line["samples"] for line in mine]
        == [line["samples"] for line in theirs]
        == [8, 8, 8, 8, 8, 3] * 2
    )
    assert [line["loss"] for line in mine] == pytest.approx(
        [line["loss"] for line in theirs], rel=1e-12
    )
    summary = json.loads((tmp_path / "cut" / "test" / "summary.json").read_text())
    assert (summary["workers"], summary["samples"], summary["events"]) == (4, 86, [])


def test_a_cut_that_forgets_its_sum_is_seen() -> None:
    """The equality above would fail if slices trained on other samples, or gradients of a
    replica were left out.
    """
    one, _ = alone(train())
    replicas = workers(2, train(), mesh="data=2")
    halves = workers(4, train(columns()), mesh="data=2, tensor=2", strategy=pl.LocalSGD(1000))
    assert distance(replicas[0][0], one) < 1e-12
    assert distance(halves[0][0], one) > 1e-3


def test_workers_along_tensor_alone_have_all_samples_each() -> None:
    one, _ = alone(train())
    assert (
        max(distance(found, one) for found, _ in workers(2, train(columns()), mesh="tensor"))
        < 1e-12
    )


@pytest.mark.parametrize(
    "mesh", ["data=2, shard=2", "data=1, shard=2, tensor=2", "data=2, shard=2, tensor=2"]
)
def test_strategies_work_along_data_and_batches_are_dealt_along_shard_too(mesh: str) -> None:
    def body(run: Run) -> Tensor:
        sizes = {name: run.mesh.axis_size(name) for name in ("data", "shard", "tensor")}
        assert run._axes.replicas.group.size == sizes["data"]
        assert run._context.group.size == sizes["data"] * sizes["shard"]
        model = network()
        cuts = [*([columns()] if sizes["tensor"] > 1 else []), summed()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, loader = run.prepare(model, optimizer, batches(40, 8), cut=cuts)
        for x, y in loader:
            assert len(x) == 8 // run._context.group.size
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        return whole(run, model)

    size = {"data=2, shard=2": 4, "data=1, shard=2, tensor=2": 4, "data=2, shard=2, tensor=2": 8}[
        mesh
    ]
    one, _ = alone(train(epochs=0))  # parameters before
    expected = alone(_one_epoch)
    found = workers(size, body, mesh=mesh)
    assert distance(expected, one) > 1e-2
    assert max(distance(each, expected) for each in found) < 1e-12


def _one_epoch(run: Run) -> Tensor:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, batches(40, 8))
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return parameters(model)


def test_ranks_are_those_of_all_workers_and_the_line_at_the_start_says_how_axes_are_dealt() -> None:
    said: list[str] = []

    def body(run: Run) -> tuple[int, int, int, Mesh]:
        train(columns(), epochs=1)(run)
        run.barrier()
        return run.rank, run.size, run.group.size, run.mesh

    mesh = Mesh((("data", 2), ("tensor", 2)), (0, 2, 1, 3))
    found = workers(4, body, mesh="tensor=2, data", hosts=(0, 1, 0, 1), said=said)
    assert found == [(rank, 4, 4, mesh) for rank in range(4)]
    line = (
        "4 workers on 2 hosts, mesh data=2, tensor=2 (tensor inside hosts, data between hosts), "
        "AllReduce(), global batch 8 = 2 x 4"
    )
    assert line in said


def test_one_worker_of_any_slice_stops_all() -> None:
    def body(run: Run) -> int:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(model, optimizer, batches(), cut=columns())
        for _ in run.epochs(5):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            if run.rank == 3:
                run.stop()
        return run.steps

    assert workers(4, body, mesh="data=2, tensor=2") == [5] * 4


def prepared(
    *cuts: Any, loader: DataLoader[Any] | None = None, **options: Any
) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        model = network()
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            *([] if loader is None else [loader]),
            cut=list(cuts),
            **options,
        )

    return body


def stepped(run: Run) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    run.prepare(model, optimizer, cut=columns())


def two_models(run: Run) -> None:
    run.prepare(network(), nn.Linear(3, 3), cut=LINEARS)


REFUSED: list[tuple[str, Callable[[Run], Any], Any, str]] = [
    (
        "tensor=2",
        prepared(),
        None,
        (
            r"the mesh \(tensor=2\) has the axis `tensor`, and no model is cut along it, "
            r"so its workers would all"
        ),
    ),
    (
        "data=2",
        prepared(columns()),
        None,
        (
            r"cut=columns\(\) is along `tensor`, and the mesh \(data=2\) has no such axis: "
            r"say pl.start"
        ),
    ),
    ("tensor=2", prepared("columns"), None, "cut='columns' is no cut; write e.g. cut="),
    ("tensor=2", prepared(3), None, "cut=3 is no cut; write e.g. cut="),
    (
        "shard=2",
        prepared(pl.shard),
        None,
        r"cut=shard is the class itself; call it: cut=pl.shard\(\.\.\.\)",
    ),
    ("tensor=2", prepared(pl.tensor), None, "cut=tensor is the class itself"),
    ("stage=2", prepared(pl.pipeline), None, "cut=pipeline is the class itself"),
    (
        "shard=2",
        lambda run: run.prepare(network(), cut=pl.shard(3)),
        None,
        r"shard\(3\): what comes first are patterns .*shard\(zero=3\)",
    ),  # type: ignore[arg-type]
    (
        "stage=2",
        lambda run: run.prepare(network(), cut=pl.pipeline(split="auto", loss=nn.MSELoss)),
        None,
        r"loss=MSELoss is the class .*MSELoss\(\)",
    ),
    (
        "tensor=2",
        two_models,
        None,
        (
            r"no module is called '0'.* That is the Linear: cut= applies to each of the 2 models "
            r"of this call"
        ),
    ),
    (
        "tensor=2",
        lambda run: run.prepare(batches(), shard="mine"),
        None,
        'shard="mine" lets each rank read its own samples, and workers',
    ),
    (
        "tensor=2",
        prepared(),
        pl.ParameterServer(),
        r"ParameterServer\(\): servers keep whole parameters, and the mesh cuts along tensor",
    ),
    (
        "tensor=2",
        prepared(),
        pl.LocalSGD(pl.adaptive()),
        "differs from part to part of a cut model, and so would the length of rounds",
    ),
    (
        "tensor=2",
        prepared(),
        pl.AllReduce(codec="auto"),
        "codec='auto' decides by measured times, and each part of a cut model would decide",
    ),
    ("tensor=2", stepped, None, "the AdamW remembers something of parameters that are cut now"),
    (
        "data=2, tensor=2",
        prepared(),
        None,
        r"doesn't fit 2 workers; these fit: data=1, tensor=2 \| data=2, tensor=1",
    ),
]


@pytest.mark.parametrize(
    ("mesh", "body", "strategy", "why"), REFUSED, ids=[case[3][:40] for case in REFUSED]
)
def test_what_cannot_be_had_is_refused_on_all_workers(
    mesh: str, body: Callable[[Run], Any], strategy: Any, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        workers(2, body, mesh=mesh, strategy=strategy)


def test_an_axis_that_nothing_uses_is_found_at_the_first_step_at_the_latest() -> None:
    def body(run: Run) -> None:
        model = run.prepare(network())
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match="no model is cut along it"):
        workers(2, body, mesh="tensor=2")


def test_other_orders_of_two_samplers_are_those_of_the_first_worker() -> None:
    def body(run: Run) -> list[float]:
        own = DataLoader(
            Numbered(),
            batch_size=8,
            shuffle=True,
            generator=torch.Generator().manual_seed(run.rank),
        )
        _, loader = run.prepare(network(), own, cut=columns(), train=True)
        return [float(x[:, 0].sum()) for x, _ in loader]

    found = workers(4, body, mesh="data=2, tensor=2")
    assert found[0] == found[1] != found[2] == found[3]


def test_different_meshes_are_named() -> None:
    def body(group: Group) -> None:
        context = SyncContext(group, Agreement(group))
        sizes: dict[str, int | None] = {"tensor": 2} if group.rank else {"shard": 2}
        RunAxes.from_mesh(lay_out_mesh(sizes, ONE_HOST), context, ONE_HOST)

    with pytest.raises(
        UsageError,
        match=r"workers were given different meshes \(rank 0: shard=2; rank 1: tensor=2\); call start",  # noqa: E501
    ):
        spawn(2, body)


LAYERS = {"0": pl.column(), "2": pl.row()}


@pytest.mark.each_choice
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "mesh", ["data=2, shard=2", "shard=2, tensor=2", "data=2, shard=2, tensor=2"]
)
def test_real_cuts_train_as_one_worker_does(mesh: str, zero: Any) -> None:
    cuts = [*([pl.tensor(LAYERS)] if "tensor" in mesh else []), pl.shard(("0", "2"), zero=zero)]
    size = 8 if mesh.count("=2") == 3 else 4

    def losses(*cuts: Any) -> Callable[[Run], list[float]]:
        def body(run: Run) -> list[float]:
            model = network()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            model, optimizer, loader = run.prepare(model, optimizer, batches(43, 8), cut=list(cuts))
            found = []
            for _ in run.epochs(2):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(x), y)
                    loss.backward()
                    norm = run.clip(model, 0.5)
                    assert norm is not None
                    optimizer.step()
                    found += [run.mean(float(loss.detach())), float(norm)]
            return found

        return body

    one = alone(losses())
    for found in workers(size, losses(*cuts), mesh=mesh):
        assert found == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize(
    ("mesh", "cut", "alone"),
    [
        ("data=2, tensor=2", UNCOMPARED, 4 * 8 * 8),
        ("data=2, shard=2", shard("2", zero=3), None),
        ("shard=2", shard(zero=1), None),
    ],
    ids=["tensor", "zero=3", "zero=1"],
)
def test_a_run_tells_what_it_exchanged_along_which_axis(
    tmp_path: Path, mesh: str, cut: Any, alone: int | None
) -> None:
    """A sum forward of 4 x 2 numbers on each of 4 workers is all that `tensor` takes here, as no
    input needs a gradient.
    """
    workers(4 if "," in mesh else 2, train(cut, epochs=1), mesh=mesh, folder=tmp_path)
    summary = json.loads((tmp_path / "test" / "summary.json").read_text())
    names = [part.partition("=")[0] for part in mesh.split(", ")]
    assert summary["mesh"] == dict.fromkeys(names, 2) and summary["places"][-1] == dict.fromkeys(
        names, 1
    )
    assert list(summary["axes"]) == names and all(
        each["seconds"] > 0 and each["within"] > 0 for each in summary["axes"].values()
    )
    assert sum(each["within"] for each in summary["axes"].values()) == pytest.approx(
        summary["bytes_sent"]["within"]
    )
    # the last batch is smaller
    assert alone is None or summary["axes"]["tensor"]["within"] <= alone
    events = json.loads((tmp_path / "test" / "trace.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes[-1].endswith(f"({', '.join(f'{name} 1' for name in names)})")
    spans = [
        (event["cat"], event["args"]["axis"])
        for event in events
        if event["ph"] == "X" and "axis" in event["args"]
    ]
    assert {axis for _, axis in spans} == set(names) and (names[-1], names[-1]) in spans


def test_the_trace_shows_what_is_exchanged_while_workers_compute(tmp_path: Path) -> None:
    """Gradients of the last unit leave for `shard`, and their sums for `data`, before the
    backward pass has come to its end.
    """
    workers(4, train(shard(("0", "2"), zero=2), epochs=1), mesh="data=2, shard=2", folder=tmp_path)
    events = json.loads((tmp_path / "test" / "trace.json").read_text())["traceEvents"]
    spans = [
        event
        for event in events
        if event["ph"] == "X" and event["pid"] == 0 and event["args"]["step"] == 2
    ]
    stretches = [
        (event["ts"], event["ts"] + event["dur"]) for event in spans if event["cat"] == "compute"
    ]
    for kind, axis, name in (
        ("shard", "shard", "the gradients of 2"),
        ("bucket", "data", "bucket 0"),
    ):
        (sent,) = (
            event["ts"]
            for event in spans
            if (event["cat"], event["args"].get("axis"), event["name"]) == (kind, axis, name)
        )
        assert any(start < sent < end for start, end in stretches), name
