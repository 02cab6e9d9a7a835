"""Kills real workers at random times, and compares the goodput with the one that was predicted.

    python benchmarks/goodput_lab.py [--seconds 75] [--seed 1] [--json]

Three policies, each with one, two and three kills:

    restart       all start again from the newest checkpoint        --restarts 200
    survive       the others go on without the lost worker          --min-workers 1
    replace       the same, and another worker takes its place      --min-workers 1 --restarts 200
                  with the state of the others

Four workers train; a sample takes them a fixed time (they sleep), so other work on the machine
hardly matters. Before, short tests measure what the prediction needs: samples per second of each
number of workers, and for each policy, by kills of their own, the times to notice, heal, save,
restart and replace. The moments of the kills are random, by the seed.

Goodput is the number of samples that count at the end, divided by those of undisturbed workers.
`predicted` is the simulation for the same moments; `by rate` is its mean over 200 other draws of
as many kills. The bar is on `predicted`: within 5 %, and the policies in the right order. The
benchmark ends with exit code 1 if it is missed.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from paceline.plan.failure_simulation import Breakage, follow_breakages
from paceline.plan.goodput import Division, FailureResponse
from paceline.plan.sample_rates import SampleRates

WORKERS = 4
BATCH = 24  # samples of a step, of all workers
SAMPLE_SECONDS = 0.02  # of a sample on one worker
SAVE_STEPS = 80  # steps between two checkpoints, with policy "restart"
KILLS = (1, 2, 3)
BAR = 0.05
DRAWS = 200
DEADLINE = 300.0  # seconds until a job that doesn't train is given up
POLICIES: Mapping[str, Sequence[str]] = {
    "restart": ("--restarts", "200"),
    "survive": ("--min-workers", "1"),
    "replace": ("--min-workers", "1", "--restarts", "200"),
}


class StepMoment(NamedTuple):
    """When a step was taken last, and by how many workers."""

    time: float
    workers: int


class LabRun(NamedTuple):
    """What a run did: its steps by number, when workers were killed, and its summary."""

    steps: dict[int, StepMoment]
    kills: list[float]
    summary: dict[str, Any]

    @property
    def began(self) -> float:
        """Time of the first step."""
        return min(moment.time for moment in self.steps.values())


# ---- the job


def train(options: argparse.Namespace) -> None:
    """Train on one worker, and log the time of each step."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl

    torch.manual_seed(0)
    out = Path(options.out)
    with (
        pl.start(name="lab", folder=str(out / "runs"), trace="off") as run,
        (out / f"steps-{os.getpid()}").open("a") as log,
    ):
        model = torch.nn.Linear(8, 1)
        data = TensorDataset(torch.ones(10**6, 8))
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), 1e-3), DataLoader(data, batch_size=BATCH)
        )
        for _ in run.epochs(1):
            for (x,) in loader:
                time.sleep(SAMPLE_SECONDS * len(x))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                # The step under way, which counts once the loop goes on.
                log.write(f"{run.steps + 1} {time.time()} {run.size}\n")
                log.flush()
                if options.save and (run.steps + 1) % options.save == 0:
                    run.save()
                # The coordinator ends the run by this file.
                if (out / "enough").exists():
                    run.stop()


def launch(out: Path, workers: int, words: Sequence[str], save: int) -> subprocess.Popen[bytes]:
    """Start a job in the background, with these further options of `paceline run`."""
    command = [sys.executable, "-m", "paceline", "run", "--workers", str(workers), *words]
    with (out / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [*command, __file__, "--out", str(out), "--save", str(save)], stderr=output
        )


def list_workers(job: subprocess.Popen[bytes]) -> list[Any]:
    """List the processes of a job that train, or will train."""
    import psutil

    children = psutil.Process(job.pid).children()
    return [
        child
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE and __file__ in child.cmdline()
    ]


def is_training(out: Path, pid: int) -> bool:
    """Tell whether a worker has taken a step."""
    path = out / f"steps-{pid}"
    return path.exists() and path.stat().st_size > 0


def wait_until(condition: Callable[[], bool], what: str, job: subprocess.Popen[bytes]) -> None:
    """Wait until a condition holds. Ends the benchmark if it takes too long."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline or job.poll() is not None:
            job.terminate()
            raise SystemExit(f"{what} didn't come")
        time.sleep(0.02)


def run_job(
    out: Path,
    words: Sequence[str],
    moments: Sequence[float],
    seconds: float,
    chance: random.Random,
    *,
    save: int = 0,
    workers: int = WORKERS,
) -> LabRun:
    """Run a job for some seconds from its first step on, and kill a worker at each moment."""
    out.mkdir(parents=True)
    job = launch(out, workers, words, save)
    try:
        kills = _kill_at(job, out, moments, seconds, chance, workers=workers)
        job.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        raise SystemExit("the job didn't end") from None
    finally:
        # Nothing stays behind, whatever happens here.
        job.terminate()
    summary = json.loads((out / "runs" / "lab" / "summary.json").read_text())
    return LabRun(read_steps(out), kills, summary)


def _kill_at(
    job: subprocess.Popen[bytes],
    out: Path,
    moments: Sequence[float],
    seconds: float,
    chance: random.Random,
    *,
    workers: int,
) -> list[float]:
    """Kill workers of a job at these moments, and let it end. Returns when they were killed."""
    wait_until(
        lambda: sum(is_training(out, child.pid) for child in list_workers(job)) == workers,
        "the first step",
        job,
    )
    began, kills = read_steps(out)[1].time, []
    for moment in moments:
        time.sleep(max(began + moment - time.time(), 0.0))
        wait_until(lambda: bool(list_workers(job)), "a worker to kill", job)
        found = list_workers(job)
        trained = [child for child in found if is_training(out, child.pid)]
        chance.choice(trained or found).send_signal(signal.SIGKILL)
        kills.append(time.time())
    time.sleep(max(began + seconds - time.time(), 0.0))
    (out / "enough").touch()
    return kills


def read_steps(out: Path) -> dict[int, StepMoment]:
    """Read when each step was taken last, on the worker that took it last."""
    steps: dict[int, StepMoment] = {}
    for path in out.glob("steps-*"):
        for line in path.read_text().splitlines():
            step, moment, size = line.split()
            taken = StepMoment(float(moment), int(size))
            steps[int(step)] = max(steps.get(int(step), taken), taken)
    return steps


# ---- what short tests measure


def list_gaps(run: LabRun) -> list[tuple[StepMoment, StepMoment]]:
    """List each two steps that follow each other."""
    moments = sorted(run.steps.values())
    return list(pairwise(moments))


def measure_rates(out: Path, chance: random.Random) -> SampleRates:
    """Measure the samples per second of each number of workers, undisturbed."""
    rates = {}
    for workers in range(1, WORKERS + 1):
        run = run_job(out / f"rate-{workers}", (), [], 6.0, chance, workers=workers)
        gaps = [after.time - before.time for before, after in list_gaps(run)]
        rates[float(workers)] = BATCH / statistics.fmean(gaps)
    return SampleRates(rates, "measured")


def find_gap(run: LabRun, kill: float) -> float:
    """Find the longest gap between two steps around a kill, less a usual step."""
    gaps = list_gaps(run)
    usual = statistics.median(after.time - before.time for before, after in gaps)
    around = [
        after.time - before.time
        for before, after in gaps
        if before.time <= kill + 3 and after.time >= kill
    ]
    return max(around) - usual


def measure_response(out: Path, policy: str, chance: random.Random) -> FailureResponse:
    """Measure the times of a policy by a run with kills of its own."""
    words = POLICIES[policy]
    save = SAVE_STEPS if policy == "restart" else 0
    moments, seconds = ([3.0, 16.0], 32.0) if policy != "survive" else ([3.0, 6.0], 10.0)
    run = run_job(out / f"test-{policy}", words, moments, seconds, chance, save=save)
    gaps = [find_gap(run, kill) for kill in run.kills]
    stall = statistics.fmean(gaps)
    response = FailureResponse(0.0, stall, 0.0, 0.0, stall, 0.0)
    if policy == "restart":
        stalls = run.summary["checkpoints"]
        saved = stalls["stall_seconds"] / max(stalls["count"], 1)
        # Repeated steps are in the gap between the last step before a kill and the first new one.
        return replace(response, save=saved, restart=measure_restart(out / "test-restart", run))
    if policy == "survive":
        return replace(response, replace=float("inf"))
    return replace(response, **measure_joins(run))


def measure_restart(out: Path, run: LabRun) -> float:
    """Measure the seconds from a kill to the first step of the next start."""
    firsts = sorted(
        min(float(line.split()[1]) for line in path.read_text().splitlines())
        for path in out.glob("steps-*")
        if path.stat().st_size
    )
    usual = BATCH * SAMPLE_SECONDS / WORKERS
    return statistics.fmean(
        min(first for first in firsts if first > kill) - kill - usual for kill in run.kills
    )


def measure_joins(run: LabRun) -> dict[str, float]:
    """Measure the seconds until a lost worker is replaced, and the pause to let it in."""
    gaps = list_gaps(run)
    usual = statistics.median(after.time - before.time for before, after in gaps)
    joins = [(before, after) for before, after in gaps if after.workers > before.workers]
    pauses = [max(after.time - before.time - usual, 0.0) for before, after in joins]
    waits = [
        min(after.time for _, after in joins if after.time > kill) - kill for kill in run.kills
    ]
    return {"replace": statistics.fmean(waits), "join": statistics.fmean(pauses)}


# ---- measured and predicted


def measure_goodput(run: LabRun, seconds: float, rates: SampleRates) -> float:
    """Samples that count at the end, divided by those of undisturbed workers."""
    steps = sum(moment.time <= run.began + seconds for moment in run.steps.values())
    return steps * BATCH / (seconds * rates.find_rate(WORKERS))


def predict_goodput(
    moments: Sequence[float], policy: str, response: FailureResponse, rates: SampleRates,
    seconds: float,
) -> float:  # fmt: skip
    """Predict the goodput if workers are killed at these moments."""
    breakages = [
        Breakage(moment, (at % WORKERS,), response.replace) for at, moment in enumerate(moments)
    ]
    period = seconds * 10
    if policy == "restart":
        period = SAVE_STEPS * BATCH / rates.find_rate(WORKERS)
    simulated = follow_breakages(
        breakages, Division(WORKERS, 0, 1 if policy == "restart" else 2), response,
        rates.find_rate, period=period, seconds=seconds,
    )  # fmt: skip
    return simulated.samples / (seconds * rates.find_rate(WORKERS))


def draw_moments(kills: int, seconds: float, chance: random.Random) -> list[float]:
    """Draw the moments of kills: uniform, without the first and the last second."""
    return sorted(chance.uniform(1.0, seconds - 1.0) for _ in range(kills))


def measure_rows(out: Path, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Run all policies with all numbers of kills. Returns the rows of the table."""
    chance = random.Random(seed)
    rates = measure_rates(out, chance)
    table = {int(workers): round(rate, 1) for workers, rate in rates.by_servers.items()}
    print("samples/s by workers:", table, flush=True)
    rows = []
    for policy, words in POLICIES.items():
        response = measure_response(out, policy, chance)
        print(f"{policy}: {response}", flush=True)
        for kills in KILLS:
            # All policies have their workers killed at the same moments.
            moments = draw_moments(kills, seconds, random.Random(seed * 100 + kills))
            save = SAVE_STEPS if policy == "restart" else 0
            run = run_job(out / f"{policy}-{kills}", words, moments, seconds, chance, save=save)
            draws = [
                draw_moments(kills, seconds, random.Random(1000 + draw)) for draw in range(DRAWS)
            ]
            by_rate = statistics.fmean(
                predict_goodput(draw, policy, response, rates, seconds) for draw in draws
            )
            row = {
                "policy": policy,
                "kills": kills,
                "kills_per_hour": 3600 * kills / seconds,
                "measured": measure_goodput(run, seconds, rates),
                "predicted": predict_goodput(moments, policy, response, rates, seconds),
                "by_rate": by_rate,
                "summary_percent": run.summary["goodput"]["percent"],
            }
            rows.append(row | {"difference": row["predicted"] / row["measured"] - 1})
            print(f"{policy}, {kills} kills: {rows[-1]['measured']:.3f}", flush=True)
    return rows


def has_right_order(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether the policies have the same order in measured and predicted goodput.

    Policies that measured within the bar of each other may have any order.
    """
    return all(
        one["predicted"] > other["predicted"]
        for one in rows
        for other in rows
        if one["kills"] == other["kills"] and one["measured"] > other["measured"] * (1 + BAR)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=75.0, help="length of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train(options)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_rows(Path(folder), options.seconds, options.seed)
    order = has_right_order(rows)
    if options.json:
        print(json.dumps({"rows": rows, "order": order}, indent=2))
    else:
        print("| policy | kills an hour | measured | predicted | difference | by rate | kept |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for row in rows:
            kept = "yes" if abs(row["difference"]) <= BAR else "MISSED"
            print(
                f"| {row['policy']} | {row['kills_per_hour']:.0f} | {row['measured']:.3f} | "
                f"{row['predicted']:.3f} | {row['difference']:+.1%} | {row['by_rate']:.3f} | "
                f"{kept} |"
            )
        print(f"order of the policies: {'right' if order else 'WRONG'}")
    raise SystemExit(0 if order and all(abs(row["difference"]) <= BAR for row in rows) else 1)


if __name__ == "__main__":
    main()
