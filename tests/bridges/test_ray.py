"""Ray Train on this machine: it resizes the group of workers, and no sample is lost or repeated."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.bridges
SAMPLES, BATCH, EPOCHS = 240, 6, 2
ROOT = Path(__file__).parents[2]
PATIENCE = 500.0  # seconds; Ray takes half a minute to start workers on a busy machine

Row = tuple[int, int, int, int]  # epoch, step, number of workers, sample


def make_parts() -> tuple[Any, Any, Any]:
    """The model, the optimizer and the loader of all trainings here."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SAMPLES, width, generator=generator).double() for width in (4, 1))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.arange(SAMPLES), x, y)
    return model, optimizer, DataLoader(data, batch_size=BATCH)


def train(options: dict[str, Any]) -> None:
    """Train, and write down who trained on which sample."""
    import torch

    import paceline as pl

    out = Path(options["out"])
    model, optimizer, loader = make_parts()
    with pl.start() as run:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        with (out / f"ids-{os.getpid()}").open("a") as seen:
            for epoch in run.epochs(EPOCHS):
                for ids, x, y in loader:
                    ((model(x) - y) ** 2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    rows = [(epoch, run.steps, run.size, n) for n in ids.tolist() if run.weight]
                    seen.write("".join(json.dumps(row) + "\n" for row in rows))
                    seen.flush()
                    # Steps are slow until the last change has come.
                    time.sleep(0.0 if (out / "go").exists() else 0.1)
        if run.is_first:
            torch.save(model.state_dict(), out / "model.pt")


def train_alone() -> dict[str, Any]:
    """The same training by one process, without paceline."""
    model, optimizer, loader = make_parts()
    for _ in range(EPOCHS):
        for _, x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, Any] = model.state_dict()
    return state


def read_rows(out: Path) -> list[Row]:
    return [
        tuple(json.loads(line))  # type: ignore[misc]
        for path in out.glob("ids-*")
        for line in path.read_text().splitlines()
        if line.endswith("]")
    ]


class OtherJob:
    """Another user of the cluster, who comes before us in Ray's autoscaling coordinator."""

    def __init__(self) -> None:
        from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as ours

        self._coordinator = ours.get_or_create_autoscaling_coordinator()

    def take_processors(self, count: int) -> None:
        import ray

        request = {
            "requester_id": "another job",
            "resources": [{"CPU": 1}] * count,
            "expire_after_s": 2 * PATIENCE,
            "priority": SimpleNamespace(value=100),  # above the highest of Ray's own
        }
        ray.get(self._coordinator.request_resources.remote(**request))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray with three processors."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        for attempt in range(5):
            try:
                ray.init(
                    num_cpus=3,
                    include_dashboard=False,
                    object_store_memory=80 << 20,
                    log_to_driver=False,
                )
                break
            # Ray gives its own processes 30 s to start, which is too little on a busy machine.
            except Exception as error:
                ray.shutdown()
                if attempt == 4 or "timed out during startup" not in str(error):
                    raise
        yield
        ray.shutdown()


def prepare_by_ray(options: dict[str, Any]) -> None:
    """Prepare a loader by Ray's own function, and write down what paceline says to it."""
    import ray.train.torch

    import paceline as pl

    _, optimizer, loader = make_parts()
    with pl.start() as run:
        try:
            run.prepare(optimizer, ray.train.torch.prepare_data_loader(loader))
        except pl.UsageError as error:
            (Path(options["out"]) / f"refused-{run.rank}").write_text(str(error))


def fit(
    out: Path,
    workers: tuple[int, int] | int,
    failures: int = 0,
    function: Callable[[dict[str, Any]], None] = train,
    **options: Any,
) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from paceline.bridges.ray import PacelineConfig

    more = {"elastic_resize_monitor_interval_s": 1} if isinstance(workers, tuple) else {}
    trainer = TorchTrainer(
        function,
        train_loop_config={"out": str(out)},
        torch_config=PacelineConfig(**options),
        scaling_config=ScalingConfig(num_workers=workers, **more),
        run_config=RunConfig(
            name="trial",
            storage_path=str(out / "storage"),
            failure_config=FailureConfig(max_failures=failures),
        ),
    )
    return trainer.fit()


def check_weights(out: Path) -> None:
    import torch

    state = torch.load(out / "model.pt")
    for name, tensor in train_alone().items():
        assert torch.allclose(state[name], tensor, rtol=0, atol=1e-12), name


def run_beside(change: Callable[[], None], errors: list[BaseException]) -> threading.Thread:
    """Do this in a thread, and keep its error."""

    def run() -> None:
        try:
            change()
        except BaseException as error:  # noqa: BLE001 (it is raised in the test)
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it doesn't come"
        time.sleep(0.1)


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.usefixtures("cluster")
def test_ray_resizes_from_2_to_3_to_2_workers(tmp_path: Path) -> None:
    other, errors = OtherJob(), list[BaseException]()
    other.take_processors(1)

    def change() -> None:
        wait_for(lambda: len(read_rows(tmp_path)) >= 5 * BATCH)
        other.take_processors(0)
        wait_for(lambda: Counter(row[2] for row in read_rows(tmp_path))[3] >= 5 * BATCH)
        other.take_processors(1)
        wait_for(lambda: max(read_rows(tmp_path), key=lambda row: row[1])[2] == 2)
        (tmp_path / "go").touch()

    thread = run_beside(change, errors)
    assert fit(tmp_path, (2, 3), sync="AllReduce(via='ring')").error is None
    thread.join(10.0)
    assert not errors, errors
    rows = sorted(read_rows(tmp_path), key=lambda row: (row[0], row[3]))
    # Each sample once in each epoch, in the order of the data set, whoever trained on it.
    assert [(row[0], row[3]) for row in rows] == [
        (epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)
    ]
    assert all(step == (epoch * SAMPLES + n) // BATCH for epoch, step, _, n in rows)
    sizes = [size for _, size in sorted({(row[1], row[2]) for row in rows})]
    changes = [size for number, size in enumerate(sizes) if not number or size != sizes[number - 1]]
    assert changes == [2, 3, 2], sizes
    check_weights(tmp_path)
    summary = tmp_path / "storage" / "trial" / "paceline" / "train-3" / "summary.json"
    assert "ring" in json.loads(summary.read_text())["sync"]


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.usefixtures("cluster")
def test_a_worker_that_is_killed_comes_back(tmp_path: Path) -> None:
    """Ray starts all again: without a checkpoint from the beginning, which is the same training."""
    errors = list[BaseException]()

    def change() -> None:
        wait_for(lambda: len(read_rows(tmp_path)) >= 5 * BATCH)
        pid = int(next(tmp_path.glob("ids-*")).name.removeprefix("ids-"))
        (tmp_path / "go").touch()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    thread = run_beside(change, errors)
    assert fit(tmp_path, 2, failures=1).error is None
    thread.join(10.0)
    assert not errors, errors
    check_weights(tmp_path)


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.usefixtures("cluster")
def test_a_loader_that_ray_has_prepared_is_refused(tmp_path: Path) -> None:
    assert fit(tmp_path, 2, function=prepare_by_ray).error is None
    texts = [path.read_text() for path in tmp_path.glob("refused-*")]
    assert len(texts) == 2 and all("give a plain" in text for text in texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "AllReduce("}, "AllReduce"),
        ({"sync": "Nothing()"}, "Nothing"),
        ({"grace_seconds": 0.0}, "grace_seconds is 0: give seconds above 0"),
    ],
)
def test_what_a_config_refuses(options: dict[str, Any], message: str) -> None:
    from paceline.bridges.ray import PacelineConfig
    from paceline.errors import UsageError

    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        PacelineConfig(**options)


def test_a_strategy_may_be_an_object() -> None:
    import paceline as pl
    from paceline.bridges.ray import PacelineConfig

    variables = PacelineConfig(
        sync=pl.LocalSGD(every=8), shares="2,1", mesh="data=2", cut="x", straggler="warn"
    ).make_variables()
    assert variables["PACELINE_SYNC"].startswith("LocalSGD(8")
    assert (variables["PACELINE_SHARES"], variables["PACELINE_MESH"]) == ("2,1", "data=2")
    assert (variables["PACELINE_CUT"], variables["PACELINE_STRAGGLER"]) == ("x", "warn")
    assert variables["PACELINE_NAME"] == "train" and "PACELINE_REPORT_TO" not in variables


def test_the_storage_has_to_be_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.fs
    import ray.train

    from paceline.bridges.ray import worker
    from paceline.errors import UsageError

    def store(filesystem: Any) -> None:
        storage = SimpleNamespace(
            storage_filesystem=filesystem, storage_fs_path="bucket", experiment_fs_path="/a/trial"
        )
        context = SimpleNamespace(get_storage=lambda: storage)
        monkeypatch.setattr(ray.train, "get_context", lambda: context)

    store(pyarrow.fs.LocalFileSystem())
    assert worker.find_storage_folder() == "/a/trial/paceline"
    store(pyarrow.fs._MockFileSystem())
    with pytest.raises(UsageError, match="the storage of this trial is bucket on a mock file"):
        worker.find_storage_folder()


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.usefixtures("cluster")
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy

    import paceline as pl

    path = ROOT / "examples" / "bridges" / "ray_train.py"
    monkeypatch.setattr(
        sys, "argv", [str(path), "--workers", "1", "2", "--storage", str(tmp_path), "--epochs", "1"]
    )
    runpy.run_path(str(path), run_name="__main__")
    assert pl.state_dict(tmp_path / "circle" / "paceline" / "train")["0.weight"].shape == (64, 2)
