"""The file of a plan, `plan.toml`: the chosen way, its predicted step, and the script it is for."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError

VERSION: Final = 2


@dataclass(frozen=True)
class PlanFile:
    """What `paceline run --plan` needs, and what the run is compared with.

    Attributes:
        script: The script that was measured.
        cluster: Where the workers are: "this host", or the file of the cluster.
        hosts: Number of hosts.
        workers: Workers of each host, in the order of the hosts.
        sync: Strategy as `--sync` takes it. Empty: the script's own.
        mesh: Mesh as `--mesh` takes it. Empty: the script's own.
        cut: Cut of the model as `--cut` takes it. Empty: the script's own.
        shares: Shares as `--shares` takes them. Empty: the script's own.
        kind: Kind of the chosen way.
        seconds_per_step: Predicted seconds of a step.
        uncertainty: Range of the prediction, as a part of it.
        samples_per_second: Predicted samples per second by number of workers: of the fastest way
            with as many workers.
    """

    script: str
    cluster: str
    hosts: int
    workers: tuple[int, ...]
    sync: str
    mesh: str
    cut: str
    shares: str
    kind: str
    seconds_per_step: float
    uncertainty: float
    samples_per_second: Mapping[int, float] = field(default_factory=dict)


def format_plan(plan: PlanFile) -> str:
    """Format a plan as TOML, which `parse_plan` reads."""
    lines = [
        "# A plan of `paceline plan`. Run it with: paceline run --plan plan.toml SCRIPT",
        f"version = {VERSION}",
        f"script = {json.dumps(plan.script)}",
        f"cluster = {json.dumps(plan.cluster)}",
        f"hosts = {plan.hosts}",
        f"workers = {list(plan.workers)}",
        f"sync = {json.dumps(plan.sync)}",
        f"mesh = {json.dumps(plan.mesh)}",
        f"cut = {json.dumps(plan.cut)}",
        f"shares = {json.dumps(plan.shares)}",
        "",
        "[predicted]",
        f"kind = {json.dumps(plan.kind)}",
        f"seconds_per_step = {plan.seconds_per_step:.6g}",
        f"uncertainty = {plan.uncertainty:.3g}",
        "",
        "[samples_per_second]  # by number of workers",
        *(f"{count} = {rate:.6g}" for count, rate in sorted(plan.samples_per_second.items())),
    ]
    return "\n".join(lines) + "\n"


def parse_plan(text: str, source: str) -> PlanFile:
    """Parse TOML of `format_plan`. Raises `UsageError` for anything else."""
    try:
        content: dict[str, Any] = tomllib.loads(text)
        if content.get("version") != VERSION:
            raise UsageError(f"{source} isn't a plan of this version: make it with `paceline plan`")
        predicted = content["predicted"]
        plan = PlanFile(
            str(content["script"]),
            str(content["cluster"]),
            int(content["hosts"]),
            tuple(int(each) for each in content["workers"]),
            str(content["sync"]),
            str(content["mesh"]),
            str(content["cut"]),
            str(content["shares"]),
            str(predicted["kind"]),
            float(predicted["seconds_per_step"]),
            float(predicted["uncertainty"]),
            {int(count): float(rate) for count, rate in content["samples_per_second"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{source} isn't a plan ({type(error).__name__}: {error}): make it with `paceline plan`"
        ) from error
    if len(plan.workers) != plan.hosts or min(plan.workers, default=0) < 1:
        raise UsageError(f"{source}: workers has to have a number above 0 for each host")
    if not plan.seconds_per_step > 0:
        raise UsageError(f"{source}: predicted.seconds_per_step has to be above 0")
    return plan


def read_plan(path: Path) -> PlanFile:
    """Read a plan. Raises `UsageError` if it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the plan {path} can't be read: {error}") from error
    return parse_plan(text, str(path))


def write_plan(path: Path, plan: PlanFile) -> None:
    """Write a plan. Raises `UsageError` if it can't be written."""
    try:
        path.write_text(format_plan(plan), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} can't be written ({error.strerror}): name another file with --out"
        ) from error
