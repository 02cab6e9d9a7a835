"""The command `paceline bench scaling`: arguments to a request, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline import options
from paceline.errors import UsageError


def scaling(
    ctx: typer.Context,
    script: Annotated[
        Path | None, typer.Argument(help="The training script; its arguments stand behind a --.")
    ] = None,
    args: options.Arguments = None,
    *,
    workers: Annotated[
        str, typer.Option("--workers", "-n", help="Numbers of workers, with commas.")
    ] = "1,2",
    kind: Annotated[
        Literal["strong", "weak", "both"] | None,
        typer.Option(help="The same batch, or one that grows; default: both with --batch-option."),
    ] = None,
    batch_option: Annotated[
        str | None,
        typer.Option(metavar="OPTION", help="The script's own option for the global batch."),
    ] = None,
    lab: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="Run on hosts of the lab: a ready-made cluster, or a .toml file.",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(help="Runs of each number of workers, in turns; that of median speed counts."),
    ] = 1,
    steps: Annotated[int, typer.Option(help="Steps after which a run is stopped.")] = 100,
    seconds: Annotated[
        float, typer.Option(help="Seconds of training after which a run is stopped.")
    ] = 60.0,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of each worker; default: its part of the cores with the most workers."
        ),
    ] = None,
    sync: options.Sync = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the run folders are to stay; default: they are removed."),
    ] = None,
    read: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN", help="Compare runs that are there, and run nothing; repeat it."
        ),
    ] = None,
) -> None:
    """Run a script with several numbers of workers: speed-up, efficiency, and where adding a
    worker stops paying.
    """
    if (script is None) == (not read):
        raise UsageError(
            "give a training script, or with --read the folders of runs, one of the two"
        )
    beside = [name for name in ctx.params if name != "read" and _is_given(ctx, name)]
    if read and beside:
        raise UsageError(
            f"--read runs nothing, so --{beside[0].replace('_', '-')} has no meaning beside it: "
            "leave it out"
        )
    from paceline.bench import scaling as bench
    from paceline.lab import description

    if script is None:
        typer.echo(bench.compare_runs(read or []))
        raise typer.Exit
    asked = bench.ScalingRequest(
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
            asked, typer.echo, lambda text: typer.echo(f"paceline: {text}", err=True)
        )
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option was written on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
