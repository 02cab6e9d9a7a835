"""Runs Horovod's own tests and PyTorch examples, unmodified, on paceline's bridge.

    python -m benchmarks.horovod_suite CHECKOUT [--workers 2,4] [--only WORD] [--mutant]

CHECKOUT is a git repository of Horovod (a clone, or a bare mirror). Its files go to a temporary
folder. A test passes if it passes on all ranks. With `--mutant` operations give back this rank's
own tensors, as if nothing was exchanged: many tests have to fail then.

Examples get a stand-in for torchvision if it isn't installed: random images, and a small network
for each model.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

TESTS = (
    "test/parallel/test_torch.py",
    "test/parallel/test_adasum_pytorch.py",
    "test/single/test_torch_elastic.py",
)
EXAMPLES = (
    ("examples/pytorch/pytorch_mnist.py", "--epochs 1 --no-cuda"),
    ("examples/pytorch/pytorch_mnist.py", "--epochs 1 --no-cuda --use-adasum"),
    ("examples/pytorch/pytorch_mnist.py", "--epochs 1 --no-cuda --fp16-allreduce"),
    (
        "examples/pytorch/pytorch_synthetic_benchmark.py",
        "--no-cuda --num-iters 2 --num-batches-per-iter 2 --num-warmup-batches 1 --batch-size 4",
    ),
    (
        "examples/pytorch/pytorch_imagenet_resnet50.py",
        "--no-cuda --epochs 1 --batch-size 8 --train-dir train --val-dir val",
    ),
    ("examples/elastic/pytorch/pytorch_mnist_elastic.py", "--epochs 1 --no-cuda"),
    (
        "examples/elastic/pytorch/pytorch_synthetic_benchmark_elastic.py",
        "--no-cuda --num-iters 2 --num-batches-per-iter 2 --num-warmup-batches 1 --batch-size 4",
    ),
    (
        "examples/elastic/pytorch/pytorch_imagenet_resnet50_elastic.py",
        "--no-cuda --epochs 1 --batch-size 8 --train-dir train --val-dir val",
    ),
)
PROGRAM = """
import importlib.util, json, os, sys, types
import pytest

for name in ("horovod.runner", "horovod.runner.util"):  # a helper of the tests, from the checkout
    sys.modules[name] = types.ModuleType(name)
spec = importlib.util.spec_from_file_location("horovod.runner.util.threads", {threads!r})
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])

# torch has gained this optimizer since. It refuses parameters of one dim, and the tests try every
# optimizer whose module has this prefix
import torch
torch.optim.Muon.__module__ = "newer." + torch.optim.Muon.__module__

if {mutant!r}:
    from paceline.bridges.horovod.engine import engine
    from paceline.bridges.horovod.engine.execution import OperationResult
    engine.run_batch = lambda group, batch: [
        OperationResult([x.clone() for x in o.tensors], [[len(x)] for x in o.tensors if x.dim()])
        for o in batch
    ]

class Outcomes:
    def __init__(self):
        self.of = {{}}
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            text = report.longrepr[2] if report.skipped else str(report.longrepr)[-1500:]
            self.of[report.nodeid.split("::")[-1]] = (report.outcome, text)

outcomes = Outcomes()
only = ["-k", {only!r}] if {only!r} else []
pytest.main(
    [{test!r}, "-v", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", *only],
    plugins=[outcomes],
)
with open(f"{{os.environ['HOROVOD_RANK']}}.json", "w") as file:
    json.dump(outcomes.of, file)
"""
TORCHVISION = """
import sys, types
import torch

class _Images(torch.utils.data.Dataset):
    shape = (1, 28, 28)
    def __init__(self, *args, **options):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(256, *self.shape, generator=generator)
        self.y = torch.randint(10, (256,), generator=generator)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], int(self.y[index])

class _Photos(_Images):
    shape = (3, 32, 32)

def _network(*args, **options):
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=4), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(128, 1000))

datasets = types.SimpleNamespace(MNIST=_Images, ImageFolder=_Photos)
transforms = types.SimpleNamespace(**{
    name: (lambda *args, **options: None)
    for name in ("Compose", "ToTensor", "Normalize", "Resize", "CenterCrop", "RandomResizedCrop",
                 "RandomHorizontalFlip")})
models = types.SimpleNamespace(resnet50=_network)
for name in ("datasets", "transforms", "models"):
    sys.modules[f"torchvision.{name}"] = globals()[name]
"""


def main() -> int:
    """Run what the command line asks for; print what passes, fails and is skipped."""
    parser = argparse.ArgumentParser(description="Run Horovod's own tests on paceline's bridge.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--part", choices=("tests", "examples", "all"), default="all")
    parser.add_argument("--mutant", action="store_true")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = extract_files(options.checkout, Path(folder))
        for workers in map(int, options.workers.split(",")):
            if options.part != "examples":
                for test in TESTS:
                    # those of `test/single` are written for one process
                    count = 1 if "/single/" in test else workers
                    failures += run_tests(
                        checkout, test, count, only=options.only, mutant=options.mutant
                    )
            if options.part != "tests":
                for script, arguments in EXAMPLES:
                    failures += run_example(checkout, script, arguments.split(), workers)
    return int(failures > 0)


def extract_files(repository: Path, folder: Path) -> Path:
    """Extract Horovod's tests and examples, and put stand-ins for missing libraries beside them."""
    paths = ["test", "examples", "horovod/runner/util/threads.py"]
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", "HEAD", *paths], check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder / "checkout", filter="data")
    stubs = folder / "stubs"
    stubs.mkdir()
    stand_ins = {
        "mock": "import sys, unittest.mock\nsys.modules[__name__] = unittest.mock\n",
        "torchvision": TORCHVISION,
        "tqdm": "import unittest.mock\ntqdm = unittest.mock.MagicMock\n",
    }
    for name, text in stand_ins.items():
        if importlib.util.find_spec(name) is None:
            (stubs / f"{name}.py").write_text(text)
    return folder / "checkout"


def run_tests(checkout: Path, test: str, workers: int, *, only: str, mutant: bool) -> int:
    """Run one file of tests; return the number of failures."""
    program = checkout.parent / "program.py"
    threads = str(checkout / "horovod/runner/util/threads.py")
    program.write_text(
        PROGRAM.format(threads=threads, test=str(checkout / test), only=only, mutant=mutant)
    )
    for old in checkout.parent.glob("*.json"):
        old.unlink()
    ended = run_workers(checkout.parent, program, [], workers)
    by_rank = [
        json.loads(path.read_text()) if (path := checkout.parent / f"{rank}.json").exists() else {}
        for rank in range(workers)
    ]
    names = sorted({name for outcomes in by_rank for name in outcomes})
    counts: Counter[str] = Counter()
    print(f"\n{test}, {workers} workers")
    for name in names:
        results = [outcomes.get(name, ("failed", "not run")) for outcomes in by_rank]
        verdict = next(
            (word for word in ("failed", "passed") if word in [r[0] for r in results]), "skipped"
        )
        counts[verdict] += 1
        if verdict != "passed":
            reasons = {text.strip().splitlines()[-1] for word, text in results if word == verdict}
            print(f"  {verdict:8}{name}: {' | '.join(sorted(reasons))[:300]}")
    print(f"  {dict(counts)}")
    if not names or not all(by_rank):
        print(ended.stdout[-3000:] + ended.stderr[-2000:])
        return 1
    return counts["failed"]


def run_example(checkout: Path, script: str, arguments: list[str], workers: int) -> int:
    """Run one example; return 1 if it fails."""
    folder = Path(tempfile.mkdtemp(dir=checkout.parent))
    ended = run_workers(folder, checkout / script, arguments, workers)
    verdict = "passed" if ended.returncode == 0 else "FAILED"
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    print(f"  {verdict} {script} {' '.join(arguments)}, {workers} workers: {last[:120]}")
    if ended.returncode:
        print(ended.stdout[-1500:] + ended.stderr[-3000:])
    return int(ended.returncode != 0)


def run_workers(
    folder: Path, script: Path, arguments: list[str], workers: int
) -> subprocess.CompletedProcess[str]:
    """Run a script with `paceline run --horovod` in a folder."""
    stubs = next(parent / "stubs" for parent in script.parents if (parent / "stubs").exists())
    paths = [str(stubs), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PACELINE_DEADLINE": "30"}
    command = [sys.executable, "-m", "paceline", "run", "--horovod", "--workers", str(workers)]
    return subprocess.run(
        [*command, str(script), *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
