"""The command `paceline bench scaling`: it turns arguments into a `ScalingRequest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline import options
from paceline.errors import UsageError


def scaling(
    ctx: typer.Context,
    script: Annotated[
        Path | None, typer.Argument(help="The training script. Its arguments follow after --.")
    ] = None,
    args: options.Arguments = None,
    *,
    workers: Annotated[
        str, typer.Option("--workers", "-n", help="Numbers of workers, with commas.")
    ] = "1,2",
    kind: Annotated[
        Literal["strong", "weak", "both"] | None,
        typer.Option(
            help="Keep the batch, or let it grow. Default: both with --batch-option, else strong."
        ),
    ] = None,
    batch_option: Annotated[
        str | None,
        typer.Option(metavar="OPTION", help="The script's own option for the global batch."),
    ] = None,
    lab: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="Run on hosts of the lab: the name of a cluster, or a .toml file.",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            help="Runs of each number of workers, in turns. The one with the median speed counts."
        ),
    ] = 1,
    steps: Annotated[int, typer.Option(help="Number of steps after which a run stops.")] = 100,
    seconds: Annotated[
        float, typer.Option(help="Seconds of training after which a run stops.")
    ] = 60.0,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of each worker. Default: its share of the cores with the most workers."
        ),
    ] = None,
    sync: options.Sync = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the run folders in this folder. Default: they are removed."),
    ] = None,
    read: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN", help="Compare existing runs, and run nothing. Give it once for each run."
        ),
    ] = None,
) -> None:
    """Run a script with several numbers of workers, and show speed-up and efficiency.

    The result tells from which number of workers on another worker no longer pays.
    """
    if (script is None) == (not read):
        raise UsageError("give either a training script, or the folders of runs with --read")
    # Options that the user has written, other than --read.
    others = [name for name in ctx.params if name != "read" and _is_given(ctx, name)]
    if read and others:
        raise UsageError(
            f"--read runs nothing, so --{others[0].replace('_', '-')} has no effect: leave it out"
        )
    # Imported here, so that --help stays quick.
    from paceline.bench import scaling as bench
    from paceline.lab import description

    if script is None:
        typer.echo(bench.compare_runs(read or []))
        raise typer.Exit
    request = bench.ScalingRequest(
        str(script),
        tuple(args or ()),
        bench.parse_worker_counts(workers),
        kind or ("both" if batch_option else "strong"),
        batch_option,
        rounds,
        steps,
        seconds,
        None if lab is None else description.find_cluster(lab),
        threads,
        sync,
        folder,
    )
    try:
        code = bench.measure_scaling(
            request, typer.echo, lambda text: typer.echo(f"paceline: {text}", err=True)
        )
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Tell whether an option was written on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
