"""`paceline plan`: says before a run which way of training is fastest, and whether more pays."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from paceline import options
from paceline.errors import UsageError

if TYPE_CHECKING:  # they import torch, which `paceline --help` does without
    from paceline.planner.answer import Plan

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
    mesh: Annotated[
        str | None, typer.Option(help="The only mesh to plan, such as 'data=2, stage=2'.")
    ] = None,
    cut: Annotated[
        str | None, typer.Option(help="The only cut to plan, such as 'shard(zero=2)'.")
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
    from paceline.planner import model_profile
    from paceline.planner.planning.plan import plan as make_plan

    assert budget is None, "it is answered by the command's class"
    if subject.suffix == ".toml":
        given = (workers, sync, mesh, cut, what_if, out, profile_out, trace, args or None)
        _refuse_script_options(subject, any(each is not None for each in given) or allow != "exact")
        from paceline.commands.plan_transformer import answer_transformer
        from paceline.planner.planning.planned_input import parse_memory

        answer_transformer(subject, cluster, parse_memory(memory), as_json=as_json)
        return
    if subject.is_dir() and profile_out is not None:
        raise UsageError(f"{subject} is a run, and has no profile: leave --profile out")
    found = make_plan(
        subject,
        workers=workers,
        cluster=cluster,
        args=args or [],
        allow=allow,
        sync=sync,
        mesh=mesh,
        cut=cut,
        memory=memory,
        what_if=what_if or [],
        folder=Path() if out is None else out.parent,
        notify=_note,
    )
    if profile_out is not None:
        _write_text(profile_out, model_profile.format_profile(found.profile))
    if out is not None:
        found.save(out)
    if trace is not None:
        from paceline.planner.trace_file import format_trace

        _write_text(trace, format_trace(found.together.step))
    if as_json:
        typer.echo(json.dumps(found.to_fields(), indent=2))
    else:
        _print_plan(found, out)


def _refuse_script_options(subject: Path, given: bool) -> None:
    if given:
        raise UsageError(
            f"{subject} is a transformer by numbers: besides --cluster, --memory and --json there "
            "are no options for it"
        )


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
