"""Measures the cost of surviving losses, for a GPT of 0.9 M or 19 M parameters.

    python benchmarks/survival.py cost  [--model small --workers 2 --batch 12 --blocks 40]
    python benchmarks/survival.py kills [--model small --workers 4 --batch 4 --kills 3 --runs 10]
    python benchmarks/survival.py count

`cost` is the cost while no worker dies. Blocks of steps with and without survival take turns in the
same run. The result is the median ratio of neighbouring blocks with its 90 % interval.
`kills` ends a random worker by SIGKILL at a random moment, several times. Killed workers are
started again, unless enough others are left. The result is the time between two steps around a
kill, less the median step.
`count` trains a model of two parameters, so nothing else takes time. The results are microseconds
of Python in a step with and without survival, on one worker, and how many more meetings and bytes a
step has with it, on two workers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import bootstrap

BLOCK = 8  # steps in a row with survival, or without
FIRST = 6  # first steps, which aren't measured
BETWEEN = (4.0, 8.0)  # seconds between two kills, so that the killed worker is back
SOON = (1.0, 3.0)  # the same, if killed workers don't come back


class SurvivalSwitch:
    """Switches the survival of losses off and on in a run that trains.

    It replaces private parts of the run: the call that recovers, and the transaction that can roll
    a step back.
    """

    def __init__(self, run: Any) -> None:
        from paceline.sync.transaction import PlainTransaction

        self._agreement, self._backward = run._agreement, run._loop.backward
        self._recovery, self._transaction = self._agreement.recovery, self._backward.transaction
        assert self._recovery is not None, "this run doesn't survive losses"
        self._plain_transaction = PlainTransaction(self._backward.sync, self._backward.context)

    def set_survival(self, *, on: bool) -> None:
        """Survive losses from now on, or stop surviving them."""
        self._agreement.recovery = self._recovery if on else None
        self._backward.recover_by(self._transaction if on else self._plain_transaction)


def train(options: argparse.Namespace) -> None:
    """Train on one worker, and log the time of each step."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset

    import paceline as pl
    from paceline.bench.training import CONTEXT, MODELS, VOCAB, Decoder

    tokens = torch.randint(
        0, VOCAB, (64 * options.batch, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )

    # The few sequences of tokens are repeated, as only the time matters.
    class Endless(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return options.steps * options.batch * options.workers

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = tokens[index % len(tokens)]
            return row[:-1], row[1:]

    torch.manual_seed(0)
    out = Path(options.out)
    with (
        pl.start(folder=str(out), trace="off") as run,
        (out / f"steps-{os.getpid()}").open("a") as log,
    ):
        model = Decoder(*MODELS[options.model])
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(Endless(), batch_size=options.batch * options.workers)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        switch: SurvivalSwitch | None = None
        for _ in run.epochs(1):
            for x, y in loader:
                if options.what == "cost" and run.steps >= FIRST:
                    switch = switch or SurvivalSwitch(run)
                    switch.set_survival(on=(run.steps // BLOCK) % 2 == 0)
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                log.write(f"{run.steps} {time.time()}\n")
                log.flush()
                # The coordinator ends the run by this file.
                if (out / "enough").exists():
                    run.stop()
        if switch is not None:
            switch.set_survival(on=True)


def moments(out: Path) -> list[float]:
    """List the time of each step, on the worker that took it last."""
    time_by_step: dict[int, float] = {}
    for path in out.glob("steps-*"):
        for line in path.read_text().splitlines():
            step, moment = line.split()
            time_by_step[int(step)] = max(time_by_step.get(int(step), 0.0), float(moment))
    return [time_by_step[step] for step in sorted(time_by_step)]


def launch(options: argparse.Namespace, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start the job in the background.

    Args:
        options: Arguments of the benchmark.
        out: Folder for logs and results.
        more: Further options of `paceline run`.
    """
    train_options = [
        f"--{name}={getattr(options, name)}" for name in ("model", "batch", "workers", "steps")
    ]
    command = [
        "paceline",
        "run",
        "--workers",
        str(options.workers),
        "--min-workers",
        "1",
        *more,
        __file__,
        options.what,
        *train_options,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", *command, f"--out={out}"], stderr=subprocess.DEVNULL
    )


def tiny(options: argparse.Namespace) -> None:
    """Train a tiny model on one worker, for `count`."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl

    meeting_nbytes: list[int] = []  # bytes of each meeting that survival adds
    with pl.start(folder=options.out, trace="off") as run:
        model = torch.nn.Linear(1, 1)
        data = TensorDataset(torch.randn(options.steps * run.size, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(data, batch_size=run.size)
        )
        gather_bytes, blocks, block_start, counts = (
            run.group.gather_bytes,
            ([], []),
            0,
            [[0, 0], [0, 0]],
        )
        # Count the meetings that only survival needs: those that settle a call.
        run.group.gather_bytes = lambda body, **options: (
            (meeting_nbytes.append(len(body)) if b"settled" in body else None)
            or gather_bytes(body, **options)
        )
        for _ in run.epochs(1):
            switch = SurvivalSwitch(run)
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
                if run.steps % BLOCK == 0:
                    # `on` is for the next block. The block that ends is of the other kind, so
                    # index 0 of `blocks` and of `counts` is with survival.
                    now, on = time.perf_counter_ns(), (run.steps // BLOCK) % 2 == 0
                    blocks[on].append((now - block_start) / 1e3 / BLOCK) if block_start else None
                    counts[on] = [
                        counts[on][0] + len(meeting_nbytes),
                        counts[on][1] + sum(meeting_nbytes),
                    ]
                    meeting_nbytes.clear()
                    switch.set_survival(on=on)
                    block_start = time.perf_counter_ns()
        switch.set_survival(on=True)
        if run.is_first:
            steps = options.steps / 2
            results = {
                "us": [statistics.median(block[2:]) for block in blocks],
                "meetings": [count / steps for count, _ in counts],
            }
            Path(options.out, "count.json").write_text(
                json.dumps(results | {"bytes": [nbytes / steps for _, nbytes in counts]})
            )


def count(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """Count what a step has more with survival than without.

    Returns microseconds of Python with and without, and the differences of meetings and of bytes.
    """
    options.steps, results_by_size = 2 * BLOCK * 200, {}
    for options.workers in (1, 2):
        assert launch(options, out).wait() == 0
        results_by_size[options.workers] = json.loads((out / "count.json").read_text())
    with_survival, without = results_by_size[1]["us"]
    differences = {
        name: results_by_size[2][name][0] - results_by_size[2][name][1]
        for name in ("meetings", "bytes")
    }
    return {"us_with": with_survival, "us_without": without, **differences}


def cost(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """Measure median steps (seconds) with and without survival, and their ratio."""
    options.steps = 2 * BLOCK * options.blocks + FIRST
    assert launch(options, out).wait() == 0
    step_times = moments(out)
    # The median step of each block. Its first step is left out: it is half with and half without.
    blocks: list[float] = []
    for start in range(2 * BLOCK, len(step_times) - BLOCK, BLOCK):
        blocks.append(
            statistics.median(
                step_times[step] - step_times[step - 1] for step in range(start + 1, start + BLOCK)
            )
        )
    with_survival, without_survival = blocks[::2], blocks[1::2]
    # Neighbouring blocks are compared, because the speed of the machine drifts.
    ratios = [
        with_seconds / without_seconds
        for with_seconds, without_seconds in zip(with_survival, without_survival, strict=False)
    ]
    interval = bootstrap(lambda median: median, ratios)
    return {
        "with": statistics.median(with_survival),
        "without": statistics.median(without_survival),
        **interval._asdict(),
    }


def kills(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """Measure the cost of kills in several runs, in seconds."""
    lost_seconds, steps = [], []
    for run_number in range(options.runs):
        (folder := out / str(run_number)).mkdir()
        median_step, run_losses = killed(options, folder, random.Random(options.seed + run_number))
        lost_seconds += run_losses
        steps.append(median_step)
    return {
        "step": statistics.median(steps),
        "median": statistics.median(lost_seconds),
        "worst": max(lost_seconds),
        "kills": len(lost_seconds),
    }


def workers(job: subprocess.Popen[bytes]) -> list[Any]:
    """List the processes of a job that train, or will train."""
    import psutil

    children = psutil.Process(job.pid).children()  # the launcher has other children, too
    return [
        child
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE and __file__ in child.cmdline()
    ]


def trains(out: Path, pid: int) -> bool:
    """Tell whether a worker has taken a step."""
    path = out / f"steps-{pid}"
    return path.exists() and path.stat().st_size > 0


def killed(
    options: argparse.Namespace, out: Path, chance: random.Random
) -> tuple[float, list[float]]:
    """Run once, and kill workers.

    Args:
        options: Arguments of the benchmark.
        out: Folder for logs.
        chance: Source of random numbers.

    Returns:
        The median step, and the cost of each kill, in seconds.
    """
    options.steps = 10**6
    restarts = options.workers <= options.kills  # otherwise enough workers are left
    job = launch(options, out, "--restarts", str(options.kills if restarts else 0))
    kill_times = []
    # Wait until all workers train.
    while sum(path.stat().st_size > 0 for path in out.glob("steps-*")) < options.workers:
        time.sleep(0.1)
    for _ in range(options.kills):
        while (
            restarts
            and len([worker for worker in workers(job) if trains(out, worker.pid)])
            < options.workers
        ):
            time.sleep(0.1)
        time.sleep(chance.uniform(*(BETWEEN if restarts else SOON)))
        chance.choice(workers(job)).send_signal(signal.SIGKILL)
        kill_times.append(time.time())
    time.sleep(SOON[1])
    (out / "enough").touch()
    job.wait()
    step_times = moments(out)
    gaps = list(pairwise(step_times))
    median_step = statistics.median(after - before for before, after in gaps)
    # The longest gap between two steps around each kill.
    lost_seconds = [
        max(
            after - before
            for before, after in gaps
            if before <= kill_time + 3 and after >= kill_time
        )
        - median_step
        for kill_time in kill_times
    ]
    return median_step, lost_seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "kills", "count"))
    parser.add_argument(
        "--model", default="small", help="small (0.9 M parameters) or medium (19 M)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=12, help="samples of a step, for each worker")
    parser.add_argument(
        "--blocks", type=int, default=40, help="blocks of steps with survival, and as many without"
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=3,
        help="kills in a run; with as many workers or fewer, they are started again",
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        (tiny if options.what == "count" else train)(options)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        results = {"cost": cost, "kills": kills, "count": count}[options.what](
            options, Path(folder)
        )
    print(
        json.dumps(
            {
                "model": options.model,
                "workers": options.workers,
                **{name: round(value, 4) for name, value in results.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
