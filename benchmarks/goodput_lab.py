"""Kills real workers at random times, and compares the goodput with the one that was predicted.

    python benchmarks/goodput_lab.py [--seconds 60] [--seed 1] [--policy restart] [--programs]

Three policies, each with one, two and three kills:

    restart       all start again from the newest checkpoint        --restarts 200
    survive       the others go on without the lost worker          --min-workers 1
    replace       the same, and another worker takes its place      --min-workers 1 --restarts 200
                  with the state of the others

Four workers train; a sample takes them a fixed time (they sleep). Before, a short test of each
policy, with kills of its own, measures the times to notice, heal, save, restart and replace. The
moments of the kills are random, by the seed.

Workers are forked from a process that has imported torch, as in the tests of paceline. Importing
it takes most of a restart, and longer the busier a machine is; `--programs` starts them as usual.

Goodput is the number of samples that count at the end, divided by those of undisturbed workers.
What these take is measured in the same run, between its kills, as the speed of a machine with other
work changes from minute to minute.
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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from paceline.planner.budgets.failure_simulation import Breakage, follow_breakages
from paceline.planner.budgets.goodput import Division, FailureResponse
from paceline.planner.budgets.sample_rates import SampleRates

WORKERS = 4
BATCH = 24  # samples of a step, of all workers
SAMPLE_SECONDS = 0.02  # of a sample on one worker
DISTURBED = 4.0  # seconds after a kill, which aren't taken for usual ones
SAVE_STEPS = 10  # steps between two checkpoints, with policy "restart"
KILLS = (1, 2, 3)
BAR = 0.05
DRAWS = 200
ROOT = str(Path(__file__).parents[1])
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


def launch(out: Path, words: Sequence[str], save: int, *, programs: bool) -> Any:
    """Start a job in the background.

    Args:
        out: Folder of the job.
        words: Further options of `paceline run`.
        save: Steps between two checkpoints; 0: none are written.
        programs: Whether workers are started as programs, and not forked.
    """
    script = [str(Path(__file__).resolve()), "--out", str(out), "--save", str(save)]
    options = ["run", "--workers", str(WORKERS), *words, *script]
    if programs:
        command = [sys.executable, "-m", "paceline", *options]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    from tests.harness import nursery, preloaded

    command = [sys.executable, preloaded.__file__, *options]
    environ = {**os.environ, preloaded.ROOM: " " * 4096}
    job = nursery.launcher(command, cwd=out, env=environ)
    # What it writes is read, or its pipes would fill up.
    threading.Thread(target=job.communicate, daemon=True).start()
    return job


def list_workers(job: Any) -> list[Any]:
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


def wait_until(condition: Callable[[], bool], what: str, job: Any) -> None:
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
    programs: bool = False,
) -> LabRun:
    """Run a job for some seconds from its first step on, and kill a worker at each moment."""
    out.mkdir(parents=True)
    job = launch(out, words, save, programs=programs)
    try:
        kills = _kill_at(job, out, moments, seconds, chance)
        job.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        raise SystemExit("the job didn't end") from None
    finally:
        # Nothing stays behind, whatever happens here.
        job.terminate()
    summary = json.loads((out / "runs" / "lab" / "summary.json").read_text())
    return LabRun(read_steps(out), kills, summary)


def _kill_at(
    job: Any,
    out: Path,
    moments: Sequence[float],
    seconds: float,
    chance: random.Random,
) -> list[float]:
    """Kill workers of a job at these moments, and let it end. Returns when they were killed."""
    wait_until(
        lambda: sum(is_training(out, child.pid) for child in list_workers(job)) == WORKERS,
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


def list_usual_gaps(run: LabRun) -> dict[int, list[float]]:
    """List the seconds of steps by number of workers, without checkpoints, and not around kills.

    Slow steps count, too: the machine may have other work.
    """
    gaps: dict[int, list[float]] = {}
    for (number, before), (_, after) in pairwise(sorted(run.steps.items())):
        is_disturbed = any(
            before.time <= kill + DISTURBED and after.time >= kill for kill in run.kills
        )
        saves = bool(run.summary["saves"]) and number % SAVE_STEPS == 0
        if before.workers == after.workers and not is_disturbed and not saves:
            gaps.setdefault(after.workers, []).append(after.time - before.time)
    return gaps


def measure_rates(run: LabRun) -> SampleRates:
    """Measure the samples per second of each number of workers in a run."""
    rates = {
        float(workers): BATCH / statistics.fmean(seconds)
        for workers, seconds in sorted(list_usual_gaps(run).items())
        if len(seconds) >= 10
    }
    return SampleRates(rates, "measured")


def measure_heal(run: LabRun, kill: float) -> float:
    """Measure the seconds that a kill costs: those after it in which no step was taken."""
    after = sorted(
        moment for moment in run.steps.values() if kill <= moment.time <= kill + DISTURBED
    )
    usual = list_usual_gaps(run)
    lost = after[-1].time - kill
    lost -= sum(statistics.fmean(usual.get(each.workers, usual[WORKERS])) for each in after[1:])
    return max(lost, 0.0)


def measure_response(
    out: Path, policy: str, chance: random.Random, *, programs: bool
) -> FailureResponse:
    """Measure the times of a policy by a run with kills of its own."""
    words = POLICIES[policy]
    save = SAVE_STEPS if policy == "restart" else 0
    moments, seconds = ([8.0, 18.0], 28.0) if policy != "survive" else ([6.0, 14.0], 20.0)
    run = run_job(
        out / f"test-{policy}", words, moments, seconds, chance, save=save, programs=programs
    )
    stall = statistics.fmean(measure_heal(run, kill) for kill in run.kills)
    response = FailureResponse(0.0, stall, 0.0, 0.0, stall, 0.0)
    if policy == "restart":
        restart = measure_restart(out / "test-restart", run)
        return replace(response, save=measure_save(run), restart=restart)
    if policy == "survive":
        return replace(response, replace=float("inf"))
    return replace(response, **measure_joins(run))


def measure_save(run: LabRun) -> float:
    """Measure the seconds by which steps with a checkpoint are longer than others."""
    usual = statistics.fmean(list_usual_gaps(run)[WORKERS])
    steps = sorted(run.steps.items())
    saves = [
        after.time - before.time - usual
        for (number, before), (_, after) in pairwise(steps)
        if number % SAVE_STEPS == 0
        and not any(before.time <= kill <= after.time for kill in run.kills)
    ]
    return max(statistics.median(saves), 0.0) if saves else 0.0


def measure_restart(out: Path, run: LabRun) -> float:
    """Measure the seconds from a kill to the first step of the next start."""
    firsts = sorted(
        min(float(line.split()[1]) for line in path.read_text().splitlines())
        for path in out.glob("steps-*")
        if path.stat().st_size
    )
    usual = statistics.fmean(list_usual_gaps(run)[WORKERS])
    return statistics.fmean(
        min(first for first in firsts if first > kill) - kill - usual for kill in run.kills
    )


def measure_joins(run: LabRun) -> dict[str, float]:
    """Measure the seconds until a lost worker is replaced, and the pause to let it in."""
    gaps = list_gaps(run)
    usual = statistics.fmean(list_usual_gaps(run)[WORKERS])
    joins = [(before, after) for before, after in gaps if after.workers > before.workers]
    pauses = [max(after.time - before.time - usual, 0.0) for before, after in joins]
    waits = [
        min(after.time for _, after in joins if after.time > kill) - kill for kill in run.kills
    ]
    return {"replace": statistics.fmean(waits), "join": statistics.fmean(pauses)}


# ---- measured and predicted


def measure_goodput(run: LabRun, seconds: float, rates: SampleRates) -> float:
    """Samples that count at the end, divided by those of undisturbed workers."""
    # Steps after the last one that was taken were lost, and the end came before they were repeated.
    last = max(run.steps, key=lambda number: run.steps[number].time)
    steps = sum(
        number <= last and moment.time <= run.began + seconds
        for number, moment in run.steps.items()
    )
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


def measure_rows(
    out: Path, seconds: float, seed: int, policies: Sequence[str], *, programs: bool
) -> list[dict[str, Any]]:
    """Run all policies with all numbers of kills. Returns the rows of the table."""
    chance = random.Random(seed)
    rows = []
    for policy in policies:
        words = POLICIES[policy]
        response = measure_response(out, policy, chance, programs=programs)
        print(f"{policy}: {response}", flush=True)
        for kills in KILLS:
            # All policies have their workers killed at the same moments.
            moments = draw_moments(kills, seconds, random.Random(seed * 100 + kills))
            save = SAVE_STEPS if policy == "restart" else 0
            run = run_job(
                out / f"{policy}-{kills}",
                words,
                moments,
                seconds,
                chance,
                save=save,
                programs=programs,
            )
            rates = measure_rates(run)
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
            print(
                f"{policy}, {kills} kills at {[round(moment, 1) for moment in moments]}: measured "
                f"{rows[-1]['measured']:.3f}, predicted {rows[-1]['predicted']:.3f}",
                flush=True,
            )
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
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--policy", action="append", choices=[*POLICIES], help="only this one; may be repeated"
    )
    parser.add_argument(
        "--programs", action="store_true", help="start workers as programs, which import torch"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train(options)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The process that forks workers comes from the tests.
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, ROOT)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_rows(
            Path(folder),
            options.seconds,
            options.seed,
            options.policy or [*POLICIES],
            programs=options.programs,
        )
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
