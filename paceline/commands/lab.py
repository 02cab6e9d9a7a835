"""`paceline lab`: clusters on this machine, for runs with slow links and faults."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from paceline import options
from paceline.cluster import secret, topology_file
from paceline.cluster.launcher.request import check_cluster
from paceline.commands.watch import make_watched_job
from paceline.unequal.probe.dtypes import check_dtypes

app = typer.Typer(
    help="A cluster on this machine: hosts, slow links and faults.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# Variables for a measurement. It must not use the file of a measured cluster, perhaps another one.
UNMEASURED_VARIABLES: Final = {"PACELINE_CLUSTER": ""}
PROBE_SCRIPT: Final = Path(__file__).parents[1] / "bench" / "probe.py"


def make_probe_arguments(dtypes: str, out: Path, *, here: bool) -> tuple[str, ...]:
    """Make the arguments of the script that measures a cluster, and check them.

    Args:
        dtypes: Names of dtypes, with commas between them.
        out: The file to write.
        here: Whether this host writes the file, so that it can be checked now.
    """
    check_dtypes(dtypes.split(","))
    if here:
        topology_file.check_target(out)
    return ("--dtypes", dtypes, "--out", str(out.absolute()))


class ScriptLast(TyperCommand):
    """A command whose options may come before and after its first argument.

    Options after its second argument, the script, are those of the script:

        paceline lab run [OPTIONS] CLUSTER [OPTIONS] SCRIPT [OPTIONS OF THE SCRIPT]
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # click stops at the first argument. So options are collected in two rounds, and moved in
        # front of it.
        before, positional = self._split_options(ctx, args)
        between, rest = self._split_options(ctx, positional[1:])
        return super().parse_args(ctx, [*before, *between, *positional[:1], *rest])

    def _split_options(self, ctx: Any, args: list[str]) -> tuple[list[str], list[str]]:
        """Split arguments into the options at their beginning, and the rest."""
        parser = type(self.make_parser(ctx))(ctx)
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "option":
                parameter.add_to_parser(parser, ctx)
        rest = parser.parse_args(list(args))[1]
        return args[: len(args) - len(rest)], rest


@app.command("run", cls=ScriptLast, context_settings={"allow_interspersed_args": False})
def run_in_lab(
    cluster: Annotated[str, typer.Argument(help="A ready-made cluster, or a .toml file.")],
    script: options.Script,
    args: options.Arguments = None,
    *,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="A fault, such as 'kill(rank=2, step=5)'; may be repeated."),
    ] = None,
    sync: options.Sync = None,
    mesh: options.Mesh = None,
    cut: options.Cut = None,
    shares: options.Shares = None,
    name: options.Name = None,
    placement: Annotated[
        str | None,
        typer.Option(help="Order of ranks over hosts; default: the order that the cluster sets."),
    ] = None,
    min_workers: options.MinWorkers = None,
    restarts: options.Restarts = 0,
    patience: options.Patience = 600.0,
    measured: options.ClusterFile = None,
    watch: options.Watch = None,
) -> None:
    """Build a cluster, run a script on all of its hosts, and take the cluster down."""
    from paceline.lab import terminal
    from paceline.lab.running import LabRequest

    if measured is not None:
        check_cluster(measured, min_workers)
    request = LabRequest(
        str(script),
        tuple(args or ()),
        fault or (),
        sync,
        name,
        min_workers=min_workers,
        restarts=restarts,
        patience=patience,
        mesh=mesh,
        cut=cut,
        shares=shares,
        environ={} if measured is None else {"PACELINE_CLUSTER": str(measured.absolute())},
        show=True,
    )
    if watch is None:
        raise typer.Exit(terminal.run_in_lab(cluster, placement, request))
    with make_watched_job(watch, secret.make_secret()) as watcher:
        # On this machine, not inside the lab: from here all of its hosts can be reached.
        watcher.begin_serving()
        code = terminal.run_in_lab(cluster, placement, replace(request, watcher=watcher))
    raise typer.Exit(code)


@app.command("probe")
def probe_in_lab(
    cluster: Annotated[str, typer.Argument(help="A ready-made cluster, or a .toml file.")],
    *,
    dtypes: options.Dtypes = "float32,bfloat16",
    out: options.MeasuredFile = Path("cluster.json"),
) -> None:
    """Build a cluster, measure it as `paceline probe` does, and take it down."""
    from paceline.lab import terminal
    from paceline.lab.running import LabRequest
    from paceline.observe.cluster_report import describe_cluster

    args = make_probe_arguments(dtypes, out, here=True)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        request = LabRequest(
            str(PROBE_SCRIPT),
            (*args, "--quiet", "--folder", folder),
            environ=UNMEASURED_VARIABLES,
            show=True,
        )
        code = terminal.run_in_lab(cluster, None, request, kept=False)
    if code == 0:
        typer.echo(describe_cluster(topology_file.read_topology(out)))
    raise typer.Exit(code)


@app.command("check")
def check_lab() -> None:
    """Check what a lab can do on this machine, and why some of it is missing."""
    from paceline.lab import terminal

    raise typer.Exit(terminal.show_abilities())


@app.command(
    "shell", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True}
)
def shell_in_lab(
    host: Annotated[str, typer.Argument(help="Name or number of a host of the running lab.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="A command to run there, quoted as for ssh; default: an interactive shell."
        ),
    ] = None,
    *,
    identity: Annotated[
        str | None, typer.Option("--lab", help="Name of the lab, if several run.")
    ] = None,
) -> None:
    """Open a shell in a host of a running lab, or run a command there."""
    from paceline.lab import terminal

    terminal.open_shell(host, command or [], identity)


@app.command("clean")
def clean_lab() -> None:
    """Remove the remains of killed labs."""
    from paceline.lab import terminal

    raise typer.Exit(terminal.remove_leftovers())
