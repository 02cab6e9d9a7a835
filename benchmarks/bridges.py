"""Compares steps of bridges with those of the same library on its own DDP over Gloo.

Each launch is a job of two workers that trains a GPT of 19 M parameters: on one host, or on two
hosts of a lab with a link of 1 Gbit/s. Launches of the variants alternate. All variants train on
the same samples, and their weights have to agree at the end.

    python -m benchmarks.bridges --bridge fabric --hosts 1 --launches 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # as other benchmarks, which are programs, import each other

import bridges_accelerate  # noqa: E402
from harness import ONE_THREAD, Row, ratio, report  # noqa: E402
from training import SETUPS, build, dealt  # noqa: E402

MODEL = "gpt-19m"
LAB = HERE / "clusters" / "two-hosts-alone.toml"
AWAY = 1e-4  # highest |difference| / |weights| from the library's own DDP
PATIENCE = 600  # seconds for a launch


class Place(NamedTuple):
    """Where this worker is: its rank, the number of workers, and of hosts."""

    rank: int
    size: int
    hosts: int


class Trained(NamedTuple):
    """What a worker has measured: seconds of each timed step, and a sample of the weights."""

    seconds: list[float]
    weights: list[float]


# ---- the variants: each trains the same steps, in the form of its library


def time_steps(steps: Iterator[None], warmup: int, count: int) -> list[float]:
    """Take steps from an iterator, and measure those after the warm-up."""
    for _ in range(warmup):
        next(steps)
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        next(steps)
        seconds.append(time.perf_counter() - start)
    return seconds


def make_parts(place: Place, *, own_share: bool) -> tuple[Any, Any, Any, Any]:
    """Make the model, its loss, an optimizer and a loader.

    Args:
        place: Where this worker is.
        own_share: Whether the loader has this worker's samples only, and not all.
    """
    import torch
    from torch.utils.data import DataLoader

    model, loss, data = build(MODEL)
    batch = SETUPS[MODEL].batch * place.size
    loader = (
        dealt(data, MODEL, place.rank, place.size)
        if own_share
        else DataLoader(data, batch_size=batch)
    )
    return model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), loader


def train_with_fabric(place: Place, own: bool, warmup: int, count: int) -> Trained:
    """Train with Fabric: on its own DDP, or on paceline."""
    from lightning.fabric import Fabric

    strategy: Any = "ddp"
    devices: dict[str, int] = {"devices": place.size // place.hosts, "num_nodes": place.hosts}
    if not own:
        from paceline.bridges.fabric import PacelineStrategy

        strategy, devices = PacelineStrategy(), {}
    fabric = Fabric(accelerator="cpu", strategy=strategy, **devices)
    fabric.launch()
    model, loss, optimizer, loader = make_parts(place, own_share=own)
    wrapped, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)

    def steps() -> Iterator[None]:
        for x, y in loader:
            fabric.backward(loss(wrapped(x), y))
            optimizer.step()
            optimizer.zero_grad()
            yield

    return Trained(time_steps(steps(), warmup, count), sample_weights(model))


def train_with_lightning(place: Place, own: bool, warmup: int, count: int) -> Trained:
    """Train with the Lightning Trainer: on its own DDP, or on paceline."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    strategy: Any = "ddp"
    devices: dict[str, int] = {"devices": place.size // place.hosts, "num_nodes": place.hosts}
    if not own:
        import paceline.bridges.lightning  # noqa: F401

        strategy, devices = "paceline", {}
    model, loss, optimizer, loader = make_parts(place, own_share=own)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return loss(self.model(x), y)

        def configure_optimizers(self) -> Any:
            return optimizer

    class Stopwatch(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.perf_counter())

    stopwatch = Stopwatch()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        limit_train_batches=warmup + count,
        use_distributed_sampler=False,
        callbacks=[stopwatch],
        **devices,
        **quiet,
    )
    trainer.fit(Module(), loader)
    ends = stopwatch.ends[warmup - 1 :]
    seconds = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return Trained(seconds, sample_weights(model))


def train_with_accelerate(place: Place, own: bool, warmup: int, count: int) -> Trained:
    """Train with Accelerate's loop: on its own DDP, or on paceline."""
    seconds, model = bridges_accelerate.train_with_accelerate(own, warmup, count)
    return Trained(seconds, sample_weights(model))


def train_with_trainer(place: Place, own: bool, warmup: int, count: int) -> Trained:
    """Train with the Trainer of transformers: on its own DDP, or on paceline."""
    seconds, model = bridges_accelerate.train_with_trainer(own, warmup, count)
    return Trained(seconds, sample_weights(model))


# by bridge; own: on the library's own DDP
BRIDGES: dict[str, Callable[[Place, bool, int, int], Trained]] = {
    "fabric": train_with_fabric,
    "lightning": train_with_lightning,
    "accelerate": train_with_accelerate,
    "transformers": train_with_trainer,
}


def sample_weights(model: Any) -> list[float]:
    """Take some of the weights, to compare variants."""
    import torch

    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return [float(value) for value in flat[::997]]


def serve(options: argparse.Namespace) -> None:
    """Train one variant as a worker; the first one writes what it has measured."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    place = Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.hosts)
    trained = BRIDGES[options.bridge](place, options.serve == "ddp", options.warmup, options.steps)
    if place.rank == 0:
        options.record.write_text(json.dumps(trained._asdict()))


# ---- the coordinator


def launch(variant: str, options: argparse.Namespace, folder: Path) -> Trained:
    """Run one variant as a job, and return what its first worker has measured."""
    record = folder / "record.json"
    record.unlink(missing_ok=True)
    where = ["run", "--workers", "2"] if options.hosts == 1 else ["lab", "run", str(LAB)]
    script = [str(HERE / "bridges.py"), "--serve", variant, "--record", str(record)]
    flags = ["--bridge", options.bridge, "--hosts", str(options.hosts)]
    counts = ["--warmup", str(options.warmup), "--steps", str(options.steps)]
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", *where, *script, *flags, *counts],
        cwd=folder,
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if ended.returncode or not record.exists():
        raise RuntimeError(f"{variant} failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
    return Trained(**json.loads(record.read_text()))


def compute_distance(one: list[float], other: list[float]) -> float:
    """Distance of weights from those of the other variant, relative to them."""
    squares = sum(value**2 for value in other)
    differences = sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
    return float((differences / squares) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bridge", choices=sorted(BRIDGES), default="fabric")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--launches", type=int, default=3, help="launches of each variant")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a launch")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them, one at least")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument("--serve", choices=("ddp", "paceline"), help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options)
        return
    medians: dict[str, list[float]] = {"ddp": [], "paceline": []}
    raw: dict[str, list[list[float]]] = {"ddp": [], "paceline": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.launches):
            weights = {}
            for variant in sorted(medians, reverse=number % 2 == 1):
                trained = launch(variant, options, Path(folder))
                weights[variant] = trained.weights
                medians[variant].append(statistics.median(trained.seconds))
                raw[variant].append(trained.seconds)
            distance = compute_distance(weights["paceline"], weights["ddp"])
            if distance > AWAY:
                raise RuntimeError(f"the weights are {distance:.2e} apart, more than {AWAY:g}")
    hosts = "one host" if options.hosts == 1 else "two hosts, 1 Gbit/s"
    seconds = {variant: statistics.median(values) for variant, values in medians.items()}
    what = f"{options.bridge}, GPT 19 M, 2 workers on {hosts}"
    compared = ratio(medians["paceline"], medians["ddp"])
    report("bridges", [Row(what, seconds, "step: paceline / ddp", compared)], options, raw)


if __name__ == "__main__":
    main()
