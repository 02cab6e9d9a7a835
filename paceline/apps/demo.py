"""The demo: a small GPT, which is trained in several ways.

One worker and two workers train it, one of them is killed, and two hosts train over a slow link.

    alone    1 worker, 1 core       40 steps ┐
    whole    1 worker, all cores    40 steps ├ a table: the same losses, and the speed-up
    (last)   2 workers             400 steps ┘
    killed   2 workers              40 steps   one is killed after half of them
    exact    2 hosts, a slow link   20 steps ┐ if this machine can build a lab
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
# Losses that differ by less count as the same, because sums in another order round differently.
LOSS_TOLERANCE = 1e-3
LaunchJob = Callable[[LaunchRequest], int]  # runs a job, and returns its exit code
# Runs `paceline lab` with these words.
RunLab = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def run_lab(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `paceline lab WORDS` in its own process, because it may enter a user namespace for good.

    The output of `paceline lab run` is shown, that of other commands is captured.
    """
    command = [sys.executable, "-m", "paceline", "lab", *words]
    stdout = None if words[0] == "run" else subprocess.PIPE
    return subprocess.run(command, stdout=stdout, text=True, check=False)


@dataclass(frozen=True)
class DemoPlan:
    """The runs of the demo.

    Attributes:
        workers: Number of workers, at least 2.
        steps: Steps of the long run, with all workers.
        alone: Steps of each short run. They are the first steps of the long run.
        folder: Folder for the run folders.
        text: Folder of .py files to learn from. Default: Python's standard library.
        meshes: Meshes for further short runs, which cut the model between the workers.
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
        # Checked here, so that the error appears once and not in each worker.
        if self.text is not None and not any(self.text.rglob("*.py")):
            raise UsageError(
                f"--text {self.text}: there are no .py files under it; give a folder that has some"
            )
        # Check the meshes before the first run, not after some minutes.
        topology = Topology((HostRanks("here", tuple(range(self.workers)), "127.0.0.1"),))
        for mesh_text in self.meshes:
            mesh.choose_mesh(mesh_text, topology, survives=False)

    def make_arguments(self, name: str, steps: int, *more: str) -> tuple[str, ...]:
        """Make the arguments of the script for one run.

        Args:
            name: Name of the run folder.
            steps: Number of steps to train.
            more: Further arguments.
        """
        text_option = ("--text", str(self.text)) if self.text else ()
        planned_steps = str(max(self.steps, steps))
        return (
            "--steps",
            str(steps),
            "--of",
            planned_steps,
            "--name",
            name,
            "--folder",
            self.folder,
            *text_option,
            *more,
        )


@dataclass(frozen=True)
class DemoOutcome:
    """The results of one run.

    Attributes:
        title: Description of the run, as the table shows it.
        summary: Content of summary.json.
        losses: Loss of each step, over all workers.
        validation: Validation loss before and after training. Default: not measured.
        sample: Text that the model has written. Default: none.
        others: Mean number of cores that other programs kept busy during the run.
    """

    title: str
    summary: dict[str, Any]
    losses: list[float]
    validation: tuple[float, float] | None = None
    sample: str = ""
    others: float = 0.0


class _RunFailed(Exception):
    """A run of the demo ended with this exit code, which is not 0."""

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
    """Make all runs; print a table, a sample of text and a summary.

    Args:
        plan: Numbers of workers and steps, and the folder for run folders.
        launch: Runs a job on this machine, and returns its exit code.
        console: Console for the table and the sentences.
        clocks: Reads how busy the processors are. Called before and after each run.
        lab: Runs `paceline lab` with some words.

    Returns:
        The exit code of the first run that failed, or 0.
    """
    last = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        outcomes = compare_worker_counts(plan, last, launch, console, clocks)
        killed = lose_worker(plan, last, launch, console)
        slow = cross_slow_link(plan, last, console, lab)
    except _RunFailed as failed:
        return failed.code
    # Speeds mean nothing if other programs used the processors.
    console.print(
        make_table(outcomes) if plan.text is None else make_table(outcomes, str(plan.text))
    )
    if is_disturbed(outcomes):
        console.print(describe_busy_machine(outcomes), style="bold", soft_wrap=True)
    elif plan.meshes:
        console.print(describe_fastest(outcomes), style="bold", soft_wrap=True)
    console.print("A sample of text that the model has learned to write:\n", style="bold")
    console.print(Text(outcomes[2].sample), soft_wrap=True)
    console.print("\nThis is what you have seen:\n", style="bold")
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
        "How it works: docs/index.md, docs/surviving.md, docs/sending-less.md", soft_wrap=True
    )
    return 0


def compare_worker_counts(
    plan: DemoPlan,
    last: str,
    launch: LaunchJob,
    console: Console,
    clocks: Callable[[], machine_load.ClockReading | None],
) -> list[DemoOutcome]:
    """Train with one worker, one worker that has all cores, all workers, and in each mesh.

    Args:
        plan: Numbers of workers and steps.
        last: Name of the long run. The names of the others begin with it.
        launch: Runs a job, and returns its exit code.
        console: Console for the title of each run.
        clocks: Reads how busy the processors are.
    """
    # Each of several workers has `share` threads. A single worker with all cores has `whole`, the
    # same sum, so that the comparison is fair.
    share = max(1, count_cores() // plan.workers)
    whole = share * plan.workers
    # Title, name, workers, threads of each worker, steps, mesh.
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
    for mesh_index, mesh_text in enumerate(plan.meshes, 1):
        runs.append(
            (
                f"{plan.workers} workers, {mesh_text}",
                f"{last}-mesh{mesh_index}",
                plan.workers,
                share,
                plan.alone,
                mesh_text,
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
    """Train the first steps with all workers, and kill the last worker after half of them.

    Args:
        plan: Numbers of workers and steps.
        last: Name of the long run. The name of this run begins with it.
        launch: Runs a job, and returns its exit code.
        console: Console for the title of the run.
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
    """Train on two hosts of a lab twice: with exact exchanges, and with compressed, rarer ones.

    Args:
        plan: The runs of the demo.
        last: Name of the long run. The names of these runs begin with it.
        console: Console for the title of each run.
        lab: Runs `paceline lab` with some words.

    Returns:
        The two outcomes, or the reason why this machine can't build a lab.
    """
    check = lab(["check"])
    if check.returncode:
        lines = (line.partition("MISSING") for line in (check.stdout or "").splitlines())
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
    """Run a job. Raise `_RunFailed` if its exit code is not 0."""
    code = launch(request)
    if code:
        raise _RunFailed(code)


def describe_same_losses(outcomes: Sequence[DemoOutcome]) -> str:
    """Say whether one worker and several workers had the same losses."""
    alone, several = outcomes[0], outcomes[2]
    difference = compute_difference(alone.losses, several.losses)
    verb = "have the same losses as" if difference < LOSS_TOLERANCE else "DON'T have the losses of"
    return (
        f"{format_count(several.summary['workers'], 'worker')} {verb} one "
        f"worker ({difference:.1e} apart "
        f"at most in {len(alone.losses)} steps). The script doesn't mention the number of workers."
    )


def describe_survival(alone: DemoOutcome, killed: DemoOutcome) -> str:
    """Describe the run in which a worker was killed.

    Only losses after the kill are compared. The killed worker logged some losses before it that it
    had not yet sent to the others, and these are lost.
    """
    step = len(alone.losses) // 2
    difference = compute_difference(alone.losses[step:], killed.losses[step:])
    counts = f"{killed.summary['samples']:,} of {alone.summary['samples']:,} samples"
    verb = "are the same as" if difference < LOSS_TOLERANCE else "are NOT the same as"
    return (
        f"A worker was killed (SIGKILL) after {step} steps, "
        f"and the others went on at once. They trained on {counts}, "
        f"each of them once, and all losses after the kill {verb} those of one worker "
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
    """Tell whether other programs used so much of the processors that speeds mean nothing."""
    return machine_load.is_crowded(
        max(outcome.others for outcome in outcomes), count_cores(), count_affinity_cores()
    )


def describe_busy_machine(outcomes: Sequence[DemoOutcome]) -> str:
    """Say why the speeds can't be compared."""
    busiest = max(outcomes, key=lambda outcome: outcome.others)
    other_use = (
        f"beside '{busiest.title}' other programs used {busiest.others:.1f} of "
        f"{format_count(count_affinity_cores(), 'core')}"
    )
    return (
        f"The machine is busy ({other_use}): the speed-up isn't meaningful, and is left out. "
        "Try again when nothing else runs.\n"
    )


def describe_fastest(outcomes: Sequence[DemoOutcome]) -> str:
    """Name the fastest run, and say how much faster it was than each of the others."""
    first, *others = sorted(
        outcomes, key=lambda outcome: outcome.summary["samples_per_second"], reverse=True
    )
    speed = first.summary["samples_per_second"]
    speed_ups = ", ".join(
        f"{speed / other.summary['samples_per_second']:.2f} times as fast as '{other.title}'"
        for other in others
    )
    return (
        f"The fastest run was '{first.title}', with {speed:,.0f} samples/s. It was {speed_ups}.\n"
    )


def read_outcome(folder: Path, title: str) -> DemoOutcome:
    """Read the results of a run of the demo from its folder."""
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    summary = json.loads((folder / "summary.json").read_text())
    if not (folder / "demo.json").exists():  # a brief run
        return DemoOutcome(title, summary, losses)
    results = json.loads((folder / "demo.json").read_text())
    before, after = results["validation"]
    return DemoOutcome(title, summary, losses, (before, after), results["sample"])


def make_table(
    outcomes: Sequence[DemoOutcome], source: str = "the standard library's sources"
) -> Table:
    """Make a table of the outcomes, side by side.

    Speed-ups and differences of losses are relative to the first outcome. `source` names the text
    that the model learned from.
    """
    base, is_quiet = outcomes[0], not is_disturbed(outcomes)
    table = Table(
        title=f"\npaceline demo: a GPT of 0.9 M parameters on {source}", title_justify="left"
    )
    table.add_column("", no_wrap=len(outcomes) <= 3)  # three columns fit in 80 letters
    for outcome in outcomes:
        table.add_column(outcome.title.replace(", ", "\n"), justify="right", no_wrap=True)
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
                if is_quiet
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
        table.add_row(label, *(cell(outcome) for outcome in outcomes))
    return table


def compute_mean(values: Sequence[float]) -> float:
    """Compute the arithmetic mean."""
    return sum(values) / len(values)


def compute_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Compute the largest difference between two curves, over the steps that both have."""
    return max(abs(first - second) for first, second in zip(one, other, strict=False))


def format_milliseconds(outcome: DemoOutcome, part: str) -> str:
    """Format the time of one part of a step."""
    return f"{outcome.summary['step_seconds'][part] * 1e3:.1f} ms"


def format_megabytes(outcome: DemoOutcome, where: str) -> str:
    """Format the number of bytes that one step sent."""
    return f"{outcome.summary['bytes_sent'][where] / 1e6:.2f} MB"
