"""`paceline plan`: says before a run which way of training is fastest, and whether more pays."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from paceline import options
from paceline.errors import UsageError

if TYPE_CHECKING:  # they import torch, which `paceline --help` does without
    from paceline.planner.answer import Plan, Wishes
    from paceline.planner.model_profile import ModelProfile
    from paceline.planner.planned_cluster import PlannedCluster

BUSY = 0.7  # part of the time for which threads have a core, on a machine that is idle otherwise
ClusterToPlan = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="The cluster: a file of paceline probe (.json), or a description (.toml, or a name "
        "of paceline lab).",
    ),
]


BUDGET_KEY = "paceline.budget"  # of the options of a budget, in the command's context


class PlanCommand(TyperCommand):
    """The command. With `--budget` it has options of its own, and answers another question."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(arg.partition("=")[0] == "--budget" for arg in args):
            from paceline.planner.budgets import budget_options

            if "--help" in args:
                typer.echo(budget_options.describe_budget_options())
                raise typer.Exit
            arguments = budget_options.parse_budget_arguments(args)
            ctx.meta[BUDGET_KEY] = arguments
            args = [arguments.plan, "--budget", str(arguments.budget)]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        if BUDGET_KEY not in ctx.meta:
            return super().invoke(ctx)
        from paceline.planner.budgets.budget_options import answer_budget

        typer.echo(answer_budget(ctx.meta[BUDGET_KEY]))
        return None


def plan(
    subject: Annotated[
        Path,
        typer.Argument(
            metavar="SCRIPT",
            help="The training script, a profile of it (.json), the folder of a run, or a "
            "transformer by numbers (.toml). With --budget: a plan. Arguments of the script come "
            "after --, as in: train.py --workers 4 -- --epochs 3",
        ),
    ],
    args: options.Arguments = None,
    *,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", help="Plan for this host with N workers.")
    ] = None,
    cluster: ClusterToPlan = None,
    allow: Annotated[
        Literal["exact", "lossy"],
        typer.Option(help="lossy: strategies that change the loss curve may win."),
    ] = "exact",
    sync: Annotated[
        str | None, typer.Option(help="The only strategy to plan, such as 'LocalSGD(every=8)'.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of a worker, such as 8GB. Default: no limit.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="A change: link=10gbit, hosts=4, workers=2 or sync=S. Repeat it."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan here, for paceline run --plan.")
    ] = None,
    profile_out: Annotated[
        Path | None,
        typer.Option("--profile", help="Write what was measured here, to plan with it again."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the simulated step here, for Perfetto or chrome://tracing."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Say what this much money buys: `paceline plan --budget 2000 --help` has the "
            "options for it."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which way of training is fastest, and whether more workers help, before a run."""
    # Commands import what they need when they run, so that `paceline --help` stays quick.
    from paceline.commands import finished_run, planned_input
    from paceline.planner import answer, model_profile, plan_file

    assert budget is None, "it is answered by the command's class"
    memory_bytes = planned_input.parse_memory(memory)
    if subject.suffix == ".toml":
        given = (workers, sync, what_if, out, profile_out, trace, args or None)
        _refuse_script_options(subject, any(each is not None for each in given) or allow != "exact")
        from paceline.commands.plan_transformer import answer_transformer

        answer_transformer(subject, cluster, memory_bytes, as_json=as_json)
        return
    changes, sync = planned_input.split_changes(what_if or [], sync)
    wishes = answer.Wishes(allow == "lossy", sync, memory_bytes)
    if subject.is_dir():
        refused = workers is not None or profile_out is not None or bool(args)
        _refuse_run_options(subject, refused)
        found, shown = finished_run.plan_run(subject, cluster, changes, wishes)
        _note(shown)
    else:
        chosen = planned_input.choose_cluster(workers, cluster)
        chosen = planned_input.apply_changes(chosen, changes)
        profile = _get_profile(subject, args or [], chosen, wishes)
        if profile_out is not None:
            _write_text(profile_out, model_profile.format_profile(profile))
        found = _plan_profile(profile, chosen, wishes, out)
    if out is not None:
        plan_file.write_plan(out, found.to_file())
    if trace is not None:
        from paceline.planner.trace_file import format_trace

        _write_text(trace, format_trace(found.together.step))
    if as_json:
        typer.echo(json.dumps(found.to_fields(), indent=2))
    else:
        _print_plan(found, out)


def _plan_profile(
    profile: ModelProfile, cluster: PlannedCluster, wishes: Wishes, out: Path | None
) -> Plan:
    """Plan with what earlier runs have shown."""
    from paceline.planner import answer, ledger

    # The ledger of earlier runs lies beside the plan.
    entries = ledger.read_entries((out or Path("plan.toml")).parent / ledger.NAME)
    correction = ledger.learn_correction(entries, cluster.source, profile.script)
    return answer.make_plan(profile, cluster, wishes, correction)


def _refuse_script_options(subject: Path, given: bool) -> None:
    if given:
        raise UsageError(
            f"{subject} is a transformer by numbers: besides --cluster, --memory and --json there "
            "are no options for it"
        )


def _refuse_run_options(subject: Path, given: bool) -> None:
    if given:
        raise UsageError(
            f"{subject} is a run: it has its own workers and arguments, and no profile; say "
            "--what-if workers=N, without --workers, --profile and arguments"
        )


def _get_profile(
    subject: Path, args: Sequence[str], cluster: PlannedCluster, wishes: Wishes
) -> ModelProfile:
    """Read a profile, or measure the script under all conditions that the candidates need."""
    from paceline.planner import model_profile

    if subject.suffix == ".json":
        return model_profile.read_profile(subject)
    if subject.suffix != ".py":
        raise UsageError(
            f"{subject}: give a training script (.py), a profile of one (.json), or a transformer "
            "by numbers (.toml)"
        )
    if not subject.is_file():
        raise UsageError(f"there is no script {subject}")
    return _measure_script(str(subject), args, cluster, wishes)


def _measure_script(
    script: str, args: Sequence[str], cluster: PlannedCluster, wishes: Wishes
) -> ModelProfile:
    """Measure whole models first. They show how the model can be cut, which is measured then."""
    from paceline.cluster.machine import count_cores
    from paceline.planner import answer, search
    from paceline.unequal.probe import script_profiler
    from paceline.unequal.probe.script_profiler import Condition

    cores = count_cores()
    whole = search.find_conditions(answer.list_wished(cluster, wishes), cores)
    micro_parts = () if wishes.sync is not None else answer.list_micro_parts(cluster)
    conditions = [Condition(*key, parts, micro_parts) for key, parts in whole.items()]
    for each in conditions:
        _note(f"measuring {each.processes} at once, {each.threads} threads each")
    profile = script_profiler.measure_script(script, args, conditions)
    cuts = replace(profile.possible_cuts, tensor_sizes=profile.tensor_sizes)
    divided = search.find_tensor_conditions(answer.list_wished(cluster, wishes, cuts), cores)
    if not divided:
        return profile
    for size, processes, threads in divided:
        _note(f"measuring {processes} that divide layers by {size}, {threads} threads each")
    workers = script_profiler.measure_tensor_workers(
        script,
        args,
        [Condition(*key[1:], parts, (), key[0]) for key, parts in divided.items()],
    )
    return replace(profile, tensor_workers=workers)


def _print_plan(found: Plan, out: Path | None) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from paceline.planner import explain

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    busy = min(condition.attended for condition in found.profile.conditions)
    if busy < BUSY:
        console.print(
            "This machine was busy while the script was measured (its threads had a core "
            f"{busy:.0%} of the time), so the figures are off: plan again when it is idle."
        )
    console.print(found.verdict)
    table = Table(box=SIMPLE)
    for name in explain.COLUMNS:
        table.add_column(name, justify="left" if name in ("way", "waits for") else "right")
    for row in explain.make_rows(found.shown(), found.alone):
        table.add_row(*row)
    console.print(table)
    for line in explain.explain_turnings(found.turnings):
        console.print(line)
    if found.correction != 1.0:
        console.print(
            f"Steps of several workers are multiplied by {found.correction:.2f}: earlier runs took "
            "that many times what was predicted for them."
        )
    if out is not None:
        console.print(f"paceline run --plan {out} {found.profile.script}")


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}") from error


def _note(text: str) -> None:
    typer.echo(f"paceline: {text}", err=True)
