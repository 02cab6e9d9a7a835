"""Compares a recommender that has its tables on servers with torch's DDP.

DDP has whole tables on each worker, and all-reduces their gradients. Both train the model of
`paceline.apps.recommender` with the same initial values, clicks and optimizer. Each has two
processes, and they take turns. At the end both are evaluated on the same clicks, after the same
number of samples.

    python benchmarks/tables.py [--rows 10000000 --dim 16 --tables 1 --servers 2]

A step of DDP takes seconds, and each of its workers needs memory for 3 to 4 copies of all tables:
2.6 GB with the defaults, twice as much with --tables 2.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import Crew, Interval, Message, Row, arguments, interleave, ratio, report, serve

HERE = Path(__file__).resolve().parent
WORKERS = 2
HELD_OUT = 32_768  # samples for the AUC
FAR = 1 << 30  # index of the first of them, behind all training samples


class Paceline:
    """The program with paceline, as in the app."""

    def __init__(self, options: argparse.Namespace) -> None:
        import paceline as pl
        from paceline.apps import recommender
        from paceline.apps.clicks import ClickLog, ClickSamples

        log = ClickLog(options.tables, options.rows, options.bag)
        self._run: Any = pl.start(name="tables", compare=None)
        self._model = recommender.build_model(
            log, options.dim, served=True, servers=options.servers
        )
        self._optimizer = recommender.make_optimizer(options.optimizer, self._model)
        loaders = (
            ClickSamples(log, 0, FAR).make_loader(options.batch),
            ClickSamples(log, FAR, HELD_OUT).make_loader(2048),
        )
        self._model, self._optimizer, self._loader, self._held_out = self._run.prepare(
            self._model, self._optimizer, *loaders
        )
        self._prefetch = options.prefetch

    def steps(self) -> Iterator[None]:
        """Train a step whenever the next item is taken."""
        from paceline.apps.recommender import compute_loss

        for numbers, ids, clicked in self._loader:
            loss = compute_loss(self._model(numbers, ids), clicked)
            if self._prefetch:
                self._model.prefetch(self._loader.peek())
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._run.log(loss=loss)
            yield

    def auc(self) -> float:
        """Compute the AUC of the present model."""
        from paceline.apps.recommender import evaluate_auc

        return evaluate_auc(self._run, self._model, self._held_out)


class DDP:
    """The program with whole tables on each worker, as in DDP's tutorial.

    Gradients are views of DDP's buckets, which saves a copy.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from paceline.apps import recommender
        from paceline.apps.clicks import ClickLog

        dist.init_process_group("gloo")
        self._rank, self._batch = dist.get_rank(), options.batch
        self._log = ClickLog(options.tables, options.rows, options.bag)
        self._plain = recommender.build_model(self._log, options.dim, served=False, servers=None)
        self._model = DistributedDataParallel(self._plain, gradient_as_bucket_view=True)
        self._optimizer = recommender.make_optimizer(options.optimizer, self._model)

    def steps(self) -> Iterator[None]:
        """Train a step whenever the next item is taken."""
        import torch

        from paceline.apps.recommender import compute_loss

        share = self._batch // WORKERS
        # Each worker takes its half of each batch.
        for start in range(self._rank * share, FAR, self._batch):
            numbers, ids, clicked = self._log.read_samples(torch.arange(start, start + share))
            compute_loss(self._model(numbers, ids), clicked).backward()
            self._optimizer.step()
            self._optimizer.zero_grad(
                set_to_none=False
            )  # so that gradients stay views of the buckets
            yield

    def auc(self) -> float:
        """Compute the AUC of the present model."""
        import torch

        from paceline.apps.clicks import compute_auc

        with torch.no_grad():
            batches = [
                self._log.read_samples(torch.arange(FAR + offset, FAR + offset + 2048))
                for offset in range(0, HELD_OUT, 2048)
            ]
            scores = [self._plain(batch.numbers, batch.ids) for batch in batches]
        return compute_auc(torch.cat(scores), torch.cat([batch.clicked for batch in batches]))


class Worker:
    """A worker of one program."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(1)
        self._program = {"paceline": Paceline, "ddp": DDP}[options.serve](options)
        self._steps = self._program.steps()

    def handle(self, message: Message) -> Message:
        """Time some steps, or evaluate the model if the message has no steps."""
        if "steps" not in message:
            return {
                "auc": self._program.auc(),
                "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            }
        start = time.perf_counter()
        for _ in range(message["steps"]):
            next(self._steps)
        return {"seconds": (time.perf_counter() - start) / message["steps"]}


def crew(name: str, options: argparse.Namespace, folder: str) -> Crew:
    """Start the processes of a program.

    Args:
        name: Name of the program.
        options: Arguments of the benchmark.
        folder: Working folder of the processes.
    """
    option_names = "tables", "rows", "dim", "bag", "batch", "optimizer", "servers"
    flags = [f"--{flag}={getattr(options, flag)}" for flag in option_names]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(WORKERS),
    ]
    flags += [] if options.prefetch else ["--no-prefetch"]
    # Initial values of large tables take a while, so patience is long.
    return Crew(
        name,
        [[*launch, str(HERE / "tables.py"), "--serve", name, *flags]],
        WORKERS,
        folder=folder,
        patience=300.0,
    )


def main() -> None:
    parser = arguments(__doc__ or "", "tables", rounds=7)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--bag", type=int, default=8, help="ids of each table in a sample")
    parser.add_argument(
        "--batch", type=int, default=4096, help="samples of a step, over both workers"
    )
    parser.add_argument("--optimizer", choices=["sgd", "adagrad"], default="adagrad")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--prefetch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--serve", choices=["paceline", "ddp"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(int(os.environ["RANK"]), Worker(options).handle)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        crew("paceline", options, folder) as ours,
        crew("ddp", options, folder) as theirs,
    ):

        def asking(asked_crew: Crew) -> Callable[[], float]:
            return lambda: max(answer["seconds"] for answer in asked_crew.ask(steps=options.steps))

        samples = interleave({"paceline": asking(ours), "ddp": asking(theirs)}, options.rounds)
        # The AUC is that of the first worker, as models are equal. Memory is that of the largest.
        ends = {
            program.name: program.ask()[0]
            | {"megabytes": max(answer["megabytes"] for answer in program.ask())}
            for program in (ours, theirs)
        }
    what = (
        f"{options.tables} x {options.rows:,} x {options.dim}, {options.servers} servers, batch "
        f"{options.batch}"
    )
    medians = {name: statistics.median(values) for name, values in samples.items()}
    auc_difference, memory_mb = (
        abs(ends["paceline"]["auc"] - ends["ddp"]["auc"]),
        ends["paceline"]["megabytes"],
    )
    count = options.batch * options.steps * (options.rounds + 1)
    note = f" (ddp: {ends['ddp']['megabytes']:.0f})"
    rows = [
        Row(
            what,
            medians,
            "samples/s: paceline / ddp",
            ratio(samples["ddp"], samples["paceline"]),
            least=2.0,
        ),
        Row(
            what,
            {},
            "MB of a worker, at most",
            Interval(memory_mb, memory_mb, memory_mb),
            most=1000.0,
            note=note,
        ),
        Row(
            what,
            {},
            f"AUC after {count:,} samples, apart",
            Interval(auc_difference, auc_difference, auc_difference),
            most=0.002,
            note=f" ({ends['ddp']['auc']:.4f})",
        ),
    ]
    if not report("tables", rows, options, {"seconds": samples, "ends": ends}) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
