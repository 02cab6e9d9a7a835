"""The demo: a small GPT trained on real text on this machine, alone and with several workers,
and a table of the results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.apps import load
from paceline.cluster import mesh
from paceline.cluster.machine import allowed, cores
from paceline.cluster.topology import HostRanks, Topology
from paceline.errors import UsageError
from paceline.formatting import counted

SCRIPT = Path(__file__).with_name("pretrain.py")
# Runs a script with arguments on so many workers of so many threads each, in a mesh; returns its
# exit code.
Launch = Callable[[Path, Sequence[str], int, int, str | None], int]


@dataclass(frozen=True)
class DemoPlan:
    """What the demo runs: `steps` with all workers, and the first `alone` of them with one, for
    speed and for the same losses.

    In each of `meshes` all workers train the first `alone` steps, too, and cut the model between
    them.
    """

    workers: int = 2
    steps: int = 800
    alone: int = 150
    folder: str = "runs"
    text: Path | None = None
    meshes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise UsageError(
                f"--workers {self.workers}: the demo compares one worker with several, so give 2 "
                "or more"
            )
        if not 2 <= self.alone <= self.steps:
            raise UsageError(
                f"--alone {self.alone}, --steps {self.steps}: give 2 <= alone <= steps"
            )
        # here, rather than in each of the workers
        if self.text is not None and not any(self.text.rglob("*.py")):
            raise UsageError(
                f"--text {self.text}: there are no .py files under it; give a folder that has some"
            )
        everyone = Topology((HostRanks("here", tuple(range(self.workers)), "127.0.0.1"),))
        for text in self.meshes:  # before the first run, rather than after some minutes
            mesh.choose(text, everyone, survives=False)


@dataclass(frozen=True)
class DemoOutcome:
    """The results of one run, and how it was made."""

    title: str
    summary: dict[str, Any]
    losses: list[float]  # of each step, over all workers
    validation: tuple[float, float]  # before and after
    sample: str
    others: float = 0.0  # cores that other programs have kept busy meanwhile


def demo(
    plan: DemoPlan,
    launch: Launch,
    console: Console,
    clocks: Callable[[], load.ClockReading | None] = load.read,
) -> int:
    """Train alone and together, print the table; return the exit code of the first run that
    failed, else 0.
    """
    # threads of each worker, and of the one that is compared with them
    share = max(1, cores() // plan.workers)
    whole = share * plan.workers
    stamp = time.strftime("%Y%m%d-%H%M%S")
    several, last = f"{plan.workers} workers, {counted(share, 'core')} each", f"demo-{stamp}"
    runs: list[tuple[str, str, int, int, int, str | None]] = [
        (f"1 worker, {counted(share, 'core')}", f"{last}-alone", 1, share, plan.alone, None),
        (f"1 worker, {counted(whole, 'core')}", f"{last}-whole", 1, whole, plan.alone, None),
        (several, last, plan.workers, share, plan.steps, None),
    ]
    for number, each in enumerate(plan.meshes):
        runs.append(
            (
                f"{plan.workers} workers, {each}",
                f"{last}-mesh{number + 1}",
                plan.workers,
                share,
                plan.alone,
                each,
            )
        )
    outcomes = []
    for title, name, workers, threads, steps, asked in runs:
        console.print(f"\n{title}: {steps} steps", style="bold")
        arguments = [
            "--steps",
            str(steps),
            "--of",
            str(plan.steps),
            "--name",
            name,
            "--folder",
            plan.folder,
        ]
        arguments += ["--text", str(plan.text)] if plan.text else []
        before = clocks()
        code = launch(SCRIPT, arguments, workers, threads, asked)
        if code != 0:
            return code
        outcomes.append(
            replace(collect(Path(plan.folder) / name, title), others=load.others(before, clocks()))
        )
    console.print(table(outcomes) if plan.text is None else table(outcomes, str(plan.text)))
    if disturbed(outcomes):
        console.print(busy(outcomes), style="bold", soft_wrap=True)
    elif plan.meshes:
        console.print(fastest(outcomes), style="bold", soft_wrap=True)
    console.print("A sample of what it has learned to write:\n", style="bold")
    console.print(Text(outcomes[2].sample), soft_wrap=True)
    console.print(f"\nWhere the time went: paceline report {plan.folder}/{last}", soft_wrap=True)
    console.print(
        f"More text: paceline generate {plan.folder}/{last} --prompt 'class '", soft_wrap=True
    )
    return 0


def disturbed(outcomes: Sequence[DemoOutcome]) -> bool:
    """Whether other programs took so much of the processors that speeds can't be compared."""
    return load.crowded(max(outcome.others for outcome in outcomes), cores(), allowed())


def busy(outcomes: Sequence[DemoOutcome]) -> str:
    """Return the remark for speeds that can't be compared."""
    most = max(outcomes, key=lambda outcome: outcome.others)
    used = (
        f"beside '{most.title}' other programs used {most.others:.1f} of "
        f"{counted(allowed(), 'core')}"
    )
    return (
        f"The machine is busy ({used}): the speed-up isn't meaningful, and is left out. "
        "Try again when nothing else runs.\n"
    )


def fastest(outcomes: Sequence[DemoOutcome]) -> str:
    """Say which of the outcomes is of the fastest run, and how much faster it was than the
    others.
    """
    first, *others = sorted(
        outcomes, key=lambda outcome: outcome.summary["samples_per_second"], reverse=True
    )
    speed = first.summary["samples_per_second"]
    behind = ", ".join(
        f"{speed / other.summary['samples_per_second']:.2f} times '{other.title}'"
        for other in others
    )
    return f"The fastest here was '{first.title}', with {speed:,.0f} samples/s: {behind}.\n"


def collect(folder: Path, title: str) -> DemoOutcome:
    """Read the results in a run folder of the demo."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    said = json.loads((folder / "demo.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    return DemoOutcome(
        title, summary, losses, (said["validation"][0], said["validation"][1]), said["sample"]
    )


def table(outcomes: Sequence[DemoOutcome], source: str = "the standard library's sources") -> Table:
    """Compare the outcomes side by side; speed-up and losses are relative to the first."""
    base, quiet = outcomes[0], not disturbed(outcomes)
    whole = Table(
        title=f"\npaceline demo: a GPT of 0.9 M parameters on {source}", title_justify="left"
    )
    whole.add_column("", no_wrap=len(outcomes) <= 3)  # 80 letters have to do
    for outcome in outcomes:
        whole.add_column(outcome.title.replace(", ", "\n"), justify="right", no_wrap=True)
    rows: list[tuple[str, Callable[[DemoOutcome], str]]] = [
        ("steps", lambda o: f"{len(o.losses)}"),
        ("train loss, first 10 steps", lambda o: f"{mean(o.losses[:10]):.3f}"),
        ("train loss, last 10 steps", lambda o: f"{mean(o.losses[-10:]):.3f}"),
        ("validation loss, start", lambda o: f"{o.validation[0]:.3f}"),
        ("validation loss, end", lambda o: f"{o.validation[1]:.3f}"),
        (
            "largest difference, 20 steps",
            lambda o: "" if o is base else f"{apart(o.losses[:20], base.losses):.1e}",
        ),
        (
            f"largest difference, {len(base.losses)} steps",
            lambda o: "" if o is base else f"{apart(o.losses, base.losses):.1e}",
        ),
        ("samples/s", lambda o: f"{o.summary['samples_per_second']:,.0f}"),
        (
            "speed-up",
            lambda o: (
                f"{o.summary['samples_per_second'] / base.summary['samples_per_second']:.2f}x"
                if quiet
                else "busy"
            ),
        ),
        *(
            (f"step, {part}", lambda o, part=part: milliseconds(o, part))
            for part in ("compute", "exchange", "wait", "data")
        ),
        ("sent in a step, within hosts", lambda o: megabytes(o, "within")),
        ("sent in a step, between hosts", lambda o: megabytes(o, "between")),
    ]
    for label, cell in rows:
        whole.add_row(label, *(cell(outcome) for outcome in outcomes))
    return whole


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference between two curves, over the steps that both have."""
    return max(abs(a - b) for a, b in zip(one, other, strict=False))


def milliseconds(outcome: DemoOutcome, part: str) -> str:
    """Return the time of a part of a step, in words."""
    return f"{outcome.summary['step_seconds'][part] * 1e3:.1f} ms"


def megabytes(outcome: DemoOutcome, where: str) -> str:
    """Return the bytes that one step sent, in words."""
    return f"{outcome.summary['bytes_sent'][where] / 1e6:.2f} MB"
