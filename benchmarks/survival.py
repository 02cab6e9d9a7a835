"""What surviving costs while nobody dies, and how long the others stand still when somebody does: a
GPT of 0.9 M or 19 M parameters.

    python benchmarks/survival.py cost  [--model small --workers 2 --batch 12 --blocks 40]
    python benchmarks/survival.py kills [--model small --workers 4 --batch 4 --kills 3 --runs 10]
    python benchmarks/survival.py count

`cost` trains with and without in turns, block by block within the same run, and gives the median
ratio of neighbouring blocks with its 90 % interval.
`kills` ends a random worker by SIGKILL at a random moment, again and again (each is started anew,
unless enough others are left), and gives what lies between two commits of the others, less the
median step.
`count` trains a model of two parameters, where nothing else takes time: what a step costs in Python
with and without, on one worker (microseconds), and how often two workers meet in a step, with how
many bytes of each.
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

BLOCK = 8  # steps in a row with or without
FIRST = 6  # steps that aren't measured
BETWEEN = (4.0, 8.0)  # seconds between two kills: who was killed is back by then
SOON = (1.0, 3.0)  # the same, where more workers are there than are killed


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
    """The script of each worker."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset

    import paceline as pl
    from paceline.bench.training import CONTEXT, MODELS, VOCAB, Decoder

    tokens = torch.randint(
        0, VOCAB, (64 * options.batch, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )

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
                if (out / "enough").exists():
                    run.stop()
        if switch is not None:
            switch.set_survival(on=True)


def moments(out: Path) -> list[float]:
    """When each step was taken, by the worker that took it last."""
    found: dict[int, float] = {}
    for path in out.glob("steps-*"):
        for line in path.read_text().splitlines():
            step, moment = line.split()
            found[int(step)] = max(found.get(int(step), 0.0), float(moment))
    return [found[step] for step in sorted(found)]


def launch(options: argparse.Namespace, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """The job, in the background."""
    given = [
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
        *given,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", *command, f"--out={out}"], stderr=subprocess.DEVNULL
    )


def tiny(options: argparse.Namespace) -> None:
    """The script of each worker for `count`."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl

    met: list[int] = []  # bytes of each meeting
    with pl.start(folder=options.out, trace="off") as run:
        model = torch.nn.Linear(1, 1)
        data = TensorDataset(torch.randn(options.steps * run.size, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(data, batch_size=run.size)
        )
        agree, blocks, began, counts = run.group.gather_bytes, ([], []), 0, [[0, 0], [0, 0]]
        run.group.gather_bytes = lambda body, **options: (
            (met.append(len(body)) if b"settled" in body else None) or agree(body, **options)
        )
        for _ in run.epochs(1):
            switch = SurvivalSwitch(run)
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
                if run.steps % BLOCK == 0:
                    # from now on: the block that ends was the other kind
                    now, on = time.perf_counter_ns(), (run.steps // BLOCK) % 2 == 0
                    blocks[on].append((now - began) / 1e3 / BLOCK) if began else None
                    counts[on] = [counts[on][0] + len(met), counts[on][1] + sum(met)]
                    met.clear()
                    switch.set_survival(on=on)
                    began = time.perf_counter_ns()
        switch.set_survival(on=True)
        if run.is_first:
            steps = options.steps / 2
            found = {
                "us": [statistics.median(block[2:]) for block in blocks],
                "meetings": [count / steps for count, _ in counts],
            }
            Path(options.out, "count.json").write_text(
                json.dumps(found | {"bytes": [nbytes / steps for _, nbytes in counts]})
            )


def count(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """What a step takes more with than without: microseconds of Python, meetings, and bytes."""
    options.steps, found = 2 * BLOCK * 200, {}
    for options.workers in (1, 2):
        assert launch(options, out).wait() == 0
        found[options.workers] = json.loads((out / "count.json").read_text())
    on, off = found[1]["us"]
    more = {name: found[2][name][0] - found[2][name][1] for name in ("meetings", "bytes")}
    return {"us_with": on, "us_without": off, **more}


def cost(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """Median steps (seconds) with and without, and their ratio."""
    options.steps = 2 * BLOCK * options.blocks + FIRST
    assert launch(options, out).wait() == 0
    found = moments(out)
    # the median step of each; the first of a block is half of the other kind
    blocks: list[float] = []
    for start in range(2 * BLOCK, len(found) - BLOCK, BLOCK):
        blocks.append(
            statistics.median(
                found[step] - found[step - 1] for step in range(start + 1, start + BLOCK)
            )
        )
    on, off = blocks[::2], blocks[1::2]
    # of neighbours: the machine is quicker or slower later
    ratios = [with_it / without for with_it, without in zip(on, off, strict=False)]
    found_ratio = bootstrap(lambda median: median, ratios)
    return {
        "with": statistics.median(on),
        "without": statistics.median(off),
        **found_ratio._asdict(),
    }


def kills(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """What kills cost, in seconds."""
    lost, steps = [], []
    for number in range(options.runs):
        (folder := out / str(number)).mkdir()
        usual, found = killed(options, folder, random.Random(options.seed + number))
        lost += found
        steps.append(usual)
    return {
        "step": statistics.median(steps),
        "median": statistics.median(lost),
        "worst": max(lost),
        "kills": len(lost),
    }


def workers(job: subprocess.Popen[bytes]) -> list[Any]:
    """Those of its processes that train, or are about to."""
    import psutil

    children = psutil.Process(job.pid).children()  # the launcher has a deputy, too
    return [
        child
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE and __file__ in child.cmdline()
    ]


def trains(out: Path, pid: int) -> bool:
    """Whether this worker has taken a step."""
    path = out / f"steps-{pid}"
    return path.exists() and path.stat().st_size > 0


def killed(
    options: argparse.Namespace, out: Path, chance: random.Random
) -> tuple[float, list[float]]:
    """The usual step of one run, and what each kill cost."""
    options.steps = 10**6
    again = options.workers <= options.kills  # else enough are left without those that die
    job = launch(options, out, "--restarts", str(options.kills if again else 0))
    moments_of = []
    while sum(path.stat().st_size > 0 for path in out.glob("steps-*")) < options.workers:
        time.sleep(0.1)
    for _ in range(options.kills):
        while (
            again
            and len([worker for worker in workers(job) if trains(out, worker.pid)])
            < options.workers
        ):
            time.sleep(0.1)
        time.sleep(chance.uniform(*(BETWEEN if again else SOON)))
        chance.choice(workers(job)).send_signal(signal.SIGKILL)
        moments_of.append(time.time())
    time.sleep(SOON[1])
    (out / "enough").touch()
    job.wait()
    found = moments(out)
    gaps = list(pairwise(found))
    usual = statistics.median(after - before for before, after in gaps)
    lost = [
        max(after - before for before, after in gaps if before <= moment + 3 and after >= moment)
        - usual
        for moment in moments_of
    ]
    return usual, lost


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "kills", "count"))
    parser.add_argument(
        "--model", default="small", help="small (0.9 M parameters) or medium (19 M)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=12, help="samples in a step, for each worker")
    parser.add_argument(
        "--blocks", type=int, default=40, help="blocks of steps with, and as many without"
    )
    parser.add_argument(
        "--kills", type=int, default=3, help="in a run; as many workers or fewer are started again"
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
        found = {"cost": cost, "kills": kills, "count": count}[options.what](options, Path(folder))
    print(
        json.dumps(
            {
                "model": options.model,
                "workers": options.workers,
                **{name: round(value, 4) for name, value in found.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
