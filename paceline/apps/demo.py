"""The demo: a small GPT trained here with one worker and two, with one killed, and over a slow
link.

    alone    1 worker, 1 core       40 steps ┐
    whole    1 worker, all cores    40 steps ├ a table: the same losses, and the speed-up
    (last)   2 workers             400 steps ┘
    killed   2 workers              40 steps   one is killed after half of them
    exact    2 hosts, a slow link   20 steps ┐ where a lab can be built
    smaller  2 hosts, a slow link   20 steps ┘
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.apps import machine_load
from paceline.cluster import mesh
from paceline.cluster.launcher.request import LaunchRequest
from paceline.cluster.machine import count_affinity_cores, count_cores
from paceline.cluster.topology import HostRanks, Topology
from paceline.errors import UsageError
from paceline.formatting import format_count

SCRIPT = Path(__file__).with_name("pretrain.py")
SLOW_STEPS = 20
EXACT_SYNC, COMPRESSED_SYNC = "AllReduce()", "LocalSGD(every=10, codec=int8())"
SLOW_LINK = """
name = "slow-link"
[all]
bandwidth = "50mbit"
[[host]]
[[host]]
"""
LOSS_TOLERANCE = (
    1e-3  # losses that differ by less are the same: sums of another order round differently
)
LaunchJob = Callable[[LaunchRequest], int]  # starts a job, and returns its exit code
# Runs `paceline lab` with these words.
RunLab = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def run_lab(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `paceline lab WORDS`: a process of its own, as it may enter a user namespace for good."""
    command = [sys.executable, "-m", "paceline", "lab", *words]
    shown = None if words[0] == "run" else subprocess.PIPE
    return subprocess.run(command, stdout=shown, text=True, check=False)


@dataclass(frozen=True)
class DemoPlan:
    """What the demo runs: `steps` with all workers, and the first `alone` of them with one.

    All workers train the first `alone` steps again while one of them is killed; and in each of
    `meshes`, with the model cut between them.
    """

    workers: int = 2
    steps: int = 400
    alone: int = 40
    folder: str = "runs"
    text: Path | None = None
    meshes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise UsageError(
                f"--workers {self.workers}: the demo compares one worker "
                "with several, so give 2 or more"
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
            mesh.choose_mesh(text, everyone, survives=False)

    def make_arguments(self, name: str, steps: int, *more: str) -> tuple[str, ...]:
        """Return the arguments of the script for a run with this name."""
        text = ("--text", str(self.text)) if self.text else ()
        whole = str(max(self.steps, steps))
        return (
            "--steps",
            str(steps),
            "--of",
            whole,
            "--name",
            name,
            "--folder",
            self.folder,
            *text,
            *more,
        )


@dataclass(frozen=True)
class DemoOutcome:
    """The results of one run, and how it was made."""

    title: str
    summary: dict[str, Any]
    losses: list[float]  # of each step, over all workers
    validation: tuple[float, float] | None = None  # before and after
    sample: str = ""
    others: float = 0.0  # cores that other programs have kept busy meanwhile


class _RunFailed(Exception):
    """A run of the demo failed, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run_demo(
    plan: DemoPlan,
    launch: LaunchJob,
    console: Console,
    clocks: Callable[[], machine_load.ClockReading | None] = machine_load.read_clocks,
    lab: RunLab = run_lab,
) -> int:
    """Make all runs, and print a table and what was seen.

    Args:
        plan: The numbers of workers and steps, and where run folders go.
        launch: Starts a job on this machine, and returns its exit code.
        console: Where the table and the sentences are printed.
        clocks: Reads how busy the processors are, before and after each run.
        lab: Runs `paceline lab` with some words.

    Returns:
        The exit code of the first run that failed, else 0.
    """
    last = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        outcomes = compare_worker_counts(plan, last, launch, console, clocks)
        killed = lose_worker(plan, last, launch, console)
        slow = cross_slow_link(plan, last, console, lab)
    except _RunFailed as failed:
        return failed.code
    console.print(
        make_table(outcomes) if plan.text is None else make_table(outcomes, str(plan.text))
    )
    if is_disturbed(outcomes):
        console.print(describe_busy_machine(outcomes), style="bold", soft_wrap=True)
    elif plan.meshes:
        console.print(describe_fastest(outcomes), style="bold", soft_wrap=True)
    console.print("A sample of what it has learned to write:\n", style="bold")
    console.print(Text(outcomes[2].sample), soft_wrap=True)
    console.print("\nWhat you have seen:\n", style="bold")
    for sentence in (
        describe_same_losses(outcomes),
        describe_survival(outcomes[0], killed),
        describe_slow_link(slow),
    ):
        console.print(Text(f"- {sentence}"), soft_wrap=True)
    console.print(f"\nWhere the time went: paceline report {plan.folder}/{last}", soft_wrap=True)
    console.print(
        f"More text: paceline generate {plan.folder}/{last} --prompt 'class '", soft_wrap=True
    )
    console.print(
        "How it is done: docs/index.md, docs/surviving.md, docs/sending-less.md", soft_wrap=True
    )
    return 0


def compare_worker_counts(
    plan: DemoPlan,
    last: str,
    launch: LaunchJob,
    console: Console,
    clocks: Callable[[], machine_load.ClockReading | None],
) -> list[DemoOutcome]:
    """Train alone, alone with all cores, with all workers, and in each mesh."""
    # threads of each worker, and of the one that is compared with them
    share = max(1, count_cores() // plan.workers)
    whole = share * plan.workers
    runs: list[tuple[str, str, int, int, int, str | None]] = [
        (f"1 worker, {format_count(share, 'core')}", f"{last}-alone", 1, share, plan.alone, None),
        (f"1 worker, {format_count(whole, 'core')}", f"{last}-whole", 1, whole, plan.alone, None),
        (
            f"{plan.workers} workers, {format_count(share, 'core')} each",
            last,
            plan.workers,
            share,
            plan.steps,
            None,
        ),
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
    for title, name, workers, threads, steps, axes in runs:
        console.print(f"\n{title}: {steps} steps", style="bold")
        arguments = plan.make_arguments(name, steps, *(() if name == last else ("--brief",)))
        before = clocks()
        run_or_fail(
            launch, LaunchRequest(str(SCRIPT), arguments, workers, threads=threads, mesh=axes)
        )
        outcomes.append(
            replace(
                read_outcome(Path(plan.folder) / name, title),
                others=machine_load.compute_other_load(before, clocks()),
            )
        )
    return outcomes


def lose_worker(plan: DemoPlan, last: str, launch: LaunchJob, console: Console) -> DemoOutcome:
    """Train the first steps with all workers; the last of them is killed after half of the
    steps.
    """
    name, title = f"{last}-killed", f"{plan.workers} workers, one of which is killed"
    console.print(f"\n{title}: {plan.alone} steps", style="bold")
    arguments = plan.make_arguments(name, plan.alone, "--brief", "--kill", str(plan.alone // 2))
    threads = max(1, count_cores() // plan.workers)
    run_or_fail(
        launch, LaunchRequest(str(SCRIPT), arguments, plan.workers, threads=threads, min_workers=1)
    )
    return read_outcome(Path(plan.folder) / name, title)


def cross_slow_link(
    plan: DemoPlan, last: str, console: Console, lab: RunLab
) -> tuple[DemoOutcome, DemoOutcome] | str:
    """Train on two hosts of a lab, exact and with little sent; return why not if there is no
    lab.
    """
    answer = lab(["check"])
    if answer.returncode:
        lines = (line.partition("MISSING") for line in (answer.stdout or "").splitlines())
        reasons = [reason.lstrip(": ") for _, word, reason in lines if word]
        return reasons[0] if reasons else "paceline lab check says why"
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        description = Path(folder) / "slow-link.toml"
        description.write_text(SLOW_LINK)
        for kind, sync in (("exact", EXACT_SYNC), ("smaller", COMPRESSED_SYNC)):
            console.print(
                f"\n2 hosts, a link of 50 Mbit/s, {sync}: {SLOW_STEPS} steps", style="bold"
            )
            arguments = plan.make_arguments(f"{last}-{kind}", SLOW_STEPS, "--brief")
            code = lab(
                ["run", "--sync", sync, str(description), str(SCRIPT), *arguments]
            ).returncode
            if code:
                raise _RunFailed(code)
            outcomes.append(read_outcome(Path(plan.folder) / f"{last}-{kind}", sync))
    return outcomes[0], outcomes[1]


def run_or_fail(launch: LaunchJob, request: LaunchRequest) -> None:
    """Run a job; raise `_RunFailed` if it fails."""
    code = launch(request)
    if code:
        raise _RunFailed(code)


def describe_same_losses(outcomes: Sequence[DemoOutcome]) -> str:
    """Say whether one worker and several had the same losses."""
    alone, several = outcomes[0], outcomes[2]
    difference = compute_difference(alone.losses, several.losses)
    verb = "have the same losses as" if difference < LOSS_TOLERANCE else "DON'T have the losses of"
    return (
        f"{format_count(several.summary['workers'], 'worker')} {verb} one "
        f"worker ({difference:.1e} apart "
        f"at most in {len(alone.losses)} steps), and the script names no number of workers."
    )


def describe_survival(alone: DemoOutcome, killed: DemoOutcome) -> str:
    """Say what became of the run whose worker was killed.

    Losses are compared after its end: what it had logged of its last steps, and not yet told the
    others, went with it.
    """
    step = len(alone.losses) // 2
    difference = compute_difference(alone.losses[step:], killed.losses[step:])
    counts = f"{killed.summary['samples']:,} of {alone.summary['samples']:,} samples"
    verb = "are the same as" if difference < LOSS_TOLERANCE else "are NOT the same as"
    return (
        f"A worker was killed (SIGKILL) after {step} steps, "
        f"and the others went on at once: {counts} "
        f"were trained on, each once, and all losses after it {verb} those of one worker "
        f"({difference:.1e} apart at most)."
    )


def describe_slow_link(slow: tuple[DemoOutcome, DemoOutcome] | str) -> str:
    """Compare the runs over a slow link, or say why there are none."""
    if isinstance(slow, str):
        return f"The slow link is left out, as this machine can't build a lab ({slow})."
    exact, smaller = slow
    times = [outcome.summary["seconds"] for outcome in slow]
    nbytes = [outcome.summary["bytes_sent"]["between"] for outcome in slow]
    return (
        f"Over a link of 50 Mbit/s, {len(exact.losses)} steps with {exact.title} took "
        f"{times[0]:.1f} s, and with {smaller.title} {times[1]:.1f} s, "
        f"for 1/{nbytes[0] / nbytes[1]:.0f} of the bytes; "
        f"the last losses are {exact.losses[-1]:.2f} and {smaller.losses[-1]:.2f}."
    )


def is_disturbed(outcomes: Sequence[DemoOutcome]) -> bool:
    """Whether other programs took so much of the processors that speeds can't be compared."""
    return machine_load.is_crowded(
        max(outcome.others for outcome in outcomes), count_cores(), count_affinity_cores()
    )


def describe_busy_machine(outcomes: Sequence[DemoOutcome]) -> str:
    """Return the remark for speeds that can't be compared."""
    most = max(outcomes, key=lambda outcome: outcome.others)
    used = (
        f"beside '{most.title}' other programs used {most.others:.1f} of "
        f"{format_count(count_affinity_cores(), 'core')}"
    )
    return (
        f"The machine is busy ({used}): the speed-up isn't meaningful, and is left out. "
        "Try again when nothing else runs.\n"
    )


def describe_fastest(outcomes: Sequence[DemoOutcome]) -> str:
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


def read_outcome(folder: Path, title: str) -> DemoOutcome:
    """Read the results in a run folder of the demo."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    summary = json.loads((folder / "summary.json").read_text())
    if not (folder / "demo.json").exists():  # a brief run
        return DemoOutcome(title, summary, losses)
    said = json.loads((folder / "demo.json").read_text())
    return DemoOutcome(
        title, summary, losses, (said["validation"][0], said["validation"][1]), said["sample"]
    )


def make_table(
    outcomes: Sequence[DemoOutcome], source: str = "the standard library's sources"
) -> Table:
    """Compare the outcomes side by side; speed-up and losses are relative to the first."""
    base, quiet = outcomes[0], not is_disturbed(outcomes)
    whole = Table(
        title=f"\npaceline demo: a GPT of 0.9 M parameters on {source}", title_justify="left"
    )
    whole.add_column("", no_wrap=len(outcomes) <= 3)  # 80 letters have to do
    for outcome in outcomes:
        whole.add_column(outcome.title.replace(", ", "\n"), justify="right", no_wrap=True)
    rows: list[tuple[str, Callable[[DemoOutcome], str]]] = [
        ("steps", lambda o: f"{len(o.losses)}"),
        ("train loss, first 10 steps", lambda o: f"{compute_mean(o.losses[:10]):.3f}"),
        ("train loss, last 10 steps", lambda o: f"{compute_mean(o.losses[-10:]):.3f}"),
        ("validation loss, start", lambda o: f"{o.validation[0]:.3f}" if o.validation else ""),
        ("validation loss, end", lambda o: f"{o.validation[1]:.3f}" if o.validation else ""),
        (
            "largest difference, 20 steps",
            lambda o: "" if o is base else f"{compute_difference(o.losses[:20], base.losses):.1e}",
        ),
        (
            f"largest difference, {len(base.losses)} steps",
            lambda o: "" if o is base else f"{compute_difference(o.losses, base.losses):.1e}",
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
            (f"step, {part}", lambda o, part=part: format_milliseconds(o, part))
            for part in ("compute", "exchange", "wait", "data")
        ),
        ("sent in a step, within hosts", lambda o: format_megabytes(o, "within")),
        ("sent in a step, between hosts", lambda o: format_megabytes(o, "between")),
    ]
    for label, cell in rows:
        whole.add_row(label, *(cell(outcome) for outcome in outcomes))
    return whole


def compute_mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def compute_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference between two curves, over the steps that both have."""
    return max(abs(a - b) for a, b in zip(one, other, strict=False))


def format_milliseconds(outcome: DemoOutcome, part: str) -> str:
    """Return the time of a part of a step, in words."""
    return f"{outcome.summary['step_seconds'][part] * 1e3:.1f} ms"


def format_megabytes(outcome: DemoOutcome, where: str) -> str:
    """Return the bytes that one step sent, in words."""
    return f"{outcome.summary['bytes_sent'][where] / 1e6:.2f} MB"
