"""The command line: turns arguments into objects, and calls the function that does the work."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import paceline
from paceline import options
from paceline.bench import scaling_command
from paceline.cluster import mesh as grid
from paceline.cluster.discover import copy_environment
from paceline.cluster.launcher import host_resources, launch, output
from paceline.cluster.launcher.request import QUIET, LaunchRequest
from paceline.cluster.launcher.supervisor import RunWatcher
from paceline.commands import lab
from paceline.commands.plan import PlanCommand
from paceline.commands.plan import plan as plan_script
from paceline.commands.trainer_variables import choose_job_shape
from paceline.commands.watch import make_watched_job, watch_run
from paceline.errors import PacelineError, UsageError
from paceline.formatting import format_bytes
from paceline.notebook import proof
from paceline.timings import DEFAULT_TIMINGS

# Commands in the order in which a user needs them: try it, train, look at the run, try a cluster,
# take the model away.
COMMAND_ORDER = (
    "demo",
    "plan",
    "run",
    "report",
    "watch",
    "layout",
    "probe",
    "lab",
    "export",
    "generate",
    "bench",
)


class OrderedGroup(TyperGroup):
    """A group that lists its commands in `COMMAND_ORDER`. Typer would list groups first."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict(
            sorted(self.commands.items(), key=lambda item: COMMAND_ORDER.index(item[0]))
        )


app = typer.Typer(
    name="paceline",
    cls=OrderedGroup,
    help="Train one PyTorch model on many processes, hosts and devices.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(lab.app, name="lab")
bench_app = typer.Typer(
    help="Measure what this machine can do.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench_app, name="bench")
bench_app.command("scaling")(scaling_command.scaling)
app.command("watch")(watch_run)
app.command("plan", cls=PlanCommand)(plan_script)

# Folders of scripts that commands start on workers.
BENCH_FOLDER, APPS_FOLDER = Path(__file__).parent / "bench", Path(__file__).parent / "apps"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
]


@app.callback()
def root(*, version: Version = False) -> None:
    """Train one PyTorch model on many processes, hosts and devices."""


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: options.Script,
    args: options.Arguments = None,
    *,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            help="Workers on this host. Default: those of --plan, PET_NPROC_PER_NODE, or 1.",
        ),
    ] = None,
    hosts: options.JobHosts = None,
    join: options.Join = None,
    host_rank: options.HostRank = None,
    secret_file: options.SecretFile = None,
    threads: options.Threads = None,
    interface: options.Interface = None,
    sync: options.Sync = None,
    mesh: options.Mesh = None,
    cut: options.Cut = None,
    shares: options.Shares = None,
    name: options.Name = None,
    placement: options.Placement = "block",
    min_workers: options.MinWorkers = None,
    restarts: options.Restarts = 0,
    patience: options.Patience = 600.0,
    resume: options.Resume = False,
    save_on_term: options.SaveOnTerm = None,
    grace_seconds: options.GraceSeconds = DEFAULT_TIMINGS.saving.grace,
    servers: options.Servers = None,
    straggler: options.Straggler = None,
    cluster: options.ClusterFile = None,
    plan: options.PlanToFollow = None,
    report_to: options.ReportTo = None,
    backend: options.Backend = None,
    horovod: options.Horovod = False,
    watch: options.Watch = None,
    progress: options.Progress = None,
    quiet: options.Quiet = False,
) -> None:
    """Start the workers of this host, and watch them to the end."""
    shape = choose_job_shape(
        *(workers, hosts, host_rank, join),
        survives=min_workers is not None,
        environ=copy_environment(),
    )
    request = LaunchRequest(
        script=str(script),
        args=tuple(args or ()),
        **shape._asdict(),
        secret_file=secret_file,
        threads=threads,
        sync=sync,
        mesh=mesh,
        cut=cut,
        shares=shares,
        name=name,
        placement=placement,
        min_workers=min_workers,
        restarts=restarts,
        patience=patience,
        resumes=resume,
        saves_on_term=save_on_term,
        grace_seconds=grace_seconds,
        servers=servers,
        straggler=straggler,
        cluster=cluster,
        report_to=report_to,
        backend=backend,
        horovod=horovod,
        progress=QUIET if quiet else progress,
    )
    if plan is not None:
        from paceline.commands.planned_run import follow_plan

        request = follow_plan(request, plan, workers)
    env = {} if interface is None else {"PACELINE_INTERFACE": interface}
    if watch is None:
        raise typer.Exit(_run_job(request, env))
    # The page serves from before the workers start until after they end.
    with make_watched_job(
        watch,
        host_resources.get_shared_secret(request, copy_environment()),
        elsewhere=request.hosts > 1 or request.join is not None,
    ) as watcher:
        code = _run_job(request, env, watcher)
    raise typer.Exit(code)


def _run_job(
    request: LaunchRequest, env: Mapping[str, str] | None = None, watcher: RunWatcher | None = None
) -> int:
    """Run a job to its end, with `env` added to the environment. Returns its exit code."""
    # A mistake in a strategy or a mesh ends the command here, before any worker starts.
    proof.check_job(request)
    return launch.run_job(request, {**copy_environment(), **(env or {})}, watcher)


@app.command()
def probe(
    *,
    workers: options.Workers = 1,
    hosts: options.Hosts = 1,
    join: options.Join = None,
    host_rank: options.HostRank = None,
    secret_file: options.SecretFile = None,
    threads: options.Threads = None,
    interface: options.Interface = None,
    placement: options.Placement = "block",
    dtypes: options.Dtypes = "float32,bfloat16",
    out: options.MeasuredFile = Path("cluster.json"),
) -> None:
    """Measure the speed of each worker and each link, warn of odd values, and write a file."""
    args = lab.make_probe_arguments(dtypes, out, here=hosts == 1)
    rendezvous = {
        "join": join,
        "host_rank": host_rank,
        "secret_file": secret_file,
        "placement": placement,
    }
    env = lab.UNMEASURED_VARIABLES | (
        {} if interface is None else {"PACELINE_INTERFACE": interface}
    )
    raise typer.Exit(
        _run_benchmark(
            "probe.py", args, workers, threads, env=env, hosts=hosts, bare=True, **rendezvous
        )
    )


@app.command(context_settings={"allow_interspersed_args": False})
def layout(
    script: options.Script,
    args: options.Arguments = None,
    *,
    workers: options.Workers = 1,
    sync: options.Sync = None,
    mesh: options.Mesh = None,
    cut: options.Cut = None,
) -> None:
    """Show the parts of a script's model that each worker would hold, without training."""
    # Commands import rich and reports only if they need them, so that `paceline run` starts faster.
    from rich.console import Console

    from paceline.observe import layout_report as table

    with tempfile.TemporaryDirectory(prefix="paceline-layout-") as folder:
        # Workers that find this variable write their layout to the folder, and end.
        request = LaunchRequest(
            script=str(script),
            args=tuple(args or ()),
            workers=workers,
            sync=sync,
            mesh=mesh,
            cut=cut,
        )
        code = _run_job(request, {"PACELINE_LAYOUT": folder})
        if code:
            raise typer.Exit(code)
        # A file has room for wide tables.
        width = None if sys.stdout.isatty() else 160
        table.print_layout(table.read_layout(Path(folder), str(script)), Console(width=width))


@app.command()
def demo(
    *,
    workers: options.Workers = 2,
    steps: Annotated[int, typer.Option(help="Steps that all workers train.")] = 400,
    alone: Annotated[int, typer.Option(help="Steps that one worker trains, to compare.")] = 40,
    folder: Annotated[str, typer.Option(help="Where run folders go.")] = "runs",
    text: Annotated[
        Path | None,
        typer.Option(help="A folder of .py files to learn from; default: the standard library."),
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(help="Train also with this mesh, such as 'tensor=2'; may be repeated."),
    ] = None,
) -> None:
    """Demonstrate equal losses on one and many workers, a lost worker, and a slow link."""
    from rich.console import Console

    from paceline.apps.demo import DemoPlan
    from paceline.apps.demo import run_demo as play

    raise typer.Exit(
        play(DemoPlan(workers, steps, alone, folder, text, tuple(mesh or ())), _run_job, Console())
    )


@app.command()
def generate(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run of paceline demo: its folder, its name in runs, or a checkpoint.",
        ),
    ],
    *,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "def ",
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-n", help="Workers on this host; default: those of --mesh, or 1."
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Grid of the workers, such as 'tensor=2'; default: tensor along all workers."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens (bytes) to write.", min=1)] = 200,
    temperature: Annotated[
        float, typer.Option(help="How freely tokens are drawn; 0 is --greedy.", min=0)
    ] = 0.8,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always take the likeliest token.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the draws; default: a different one each time.")
    ] = None,
    best: options.Best = False,
    threads: options.Threads = None,
) -> None:
    """Generate text with the model of a run, on any mesh."""
    from paceline.observe.choosing import choose_run

    # Without --workers, as many as the mesh has.
    job_size = (
        workers if workers is not None else 1 if mesh is None else grid.count_mesh_workers(mesh)
    )
    if mesh is not None and grid.parse_mesh(mesh).get("data", 1) != 1:
        raise UsageError(
            f"--mesh {mesh!r} has replicas, which would all write the same text; leave out `data`"
        )
    if not prompt:
        raise UsageError("--prompt is empty: give at least one character to continue")
    run_folder = choose_run(folder)
    if not run_folder.is_dir():
        raise UsageError(
            f"there is no folder {run_folder}; give the folder of a run, such as runs/NAME, "
            "or of one of its checkpoints"
        )
    args = [
        f"--of={run_folder}",
        f"--prompt={prompt}",
        f"--tokens={tokens}",
        f"--temperature={0.0 if greedy else temperature}",
    ]
    args += [*([] if seed is None else [f"--seed={seed}"]), *(["--best"] if best else [])]
    script = str(APPS_FOLDER / "generation.py")
    request = LaunchRequest(script, tuple(args), job_size, threads=threads, mesh=mesh, bare=True)
    raise typer.Exit(_run_job(request))


@bench_app.command()
def collectives(
    *,
    workers: options.Workers = 2,
    threads: options.Threads = None,
    sizes: Annotated[
        str, typer.Option(help="Sizes of the tensors, with KB or MB.")
    ] = "4KB,256KB,1MB,8MB,33MB",
    via: Annotated[
        str, typer.Option(help="Ways to all-reduce: native, or names of schedules.")
    ] = "native,direct,ring,tree,halving-doubling",
    seconds: Annotated[float, typer.Option(help="Seconds to measure each for.", min=0)] = 0.5,
    draw: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEDULE:N", help="Draw a schedule for N workers, and measure nothing."
        ),
    ] = None,
) -> None:
    """Measure all-reduce: sizes, schedules, registered and ordinary memory."""
    # A drawing needs no workers.
    if draw is not None:
        from paceline.bench.schedule_pictures import draw_picture

        typer.echo(draw_picture(draw))
        raise typer.Exit
    from paceline.bench import collective_options

    # Both are parsed here only to raise before any worker starts.
    collective_options.parse_sizes(sizes), collective_options.parse_algorithms(via)
    args = ("--sizes", sizes, "--via", via, "--seconds", str(seconds))
    raise typer.Exit(_run_benchmark("collectives.py", args, workers, threads))


@bench_app.command()
def training(
    *,
    workers: options.Workers = 2,
    threads: options.Threads = None,
    model: Annotated[
        Literal["small", "medium"], typer.Option(help="0.9 M or 19 M parameters.")
    ] = "small",
    batch: Annotated[int, typer.Option(help="Samples in a step, for each worker.", min=1)] = 12,
    steps: Annotated[int, typer.Option(help="Steps to measure.", min=1)] = 60,
    sync: options.Sync = None,
) -> None:
    """Measure a training step, with the exchange and without it."""
    args = ("--model", model, "--batch", str(batch), "--steps", str(steps))
    raise typer.Exit(_run_benchmark("training.py", args, workers, threads, sync=sync))


@bench_app.command()
def pipeline(
    *,
    draw: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEDULE:RxM",
            help="Draw a schedule for R ranks and M micro-batches; 'all' compares them.",
        ),
    ] = None,
    forward: Annotated[
        float,
        typer.Option(help="Time of a forward of one micro-batch through all stages of a rank."),
    ] = 1.0,
    backward: Annotated[float, typer.Option(help="Time of the backward.")] = 2.0,
    transfer: Annotated[
        float, typer.Option(help="Time to send the activations of one stage to the next.")
    ] = 0.0,
) -> None:
    """Draw schedules of pipelines, with their bubbles and the activations that they keep."""
    from rich.console import Console

    from paceline.bench import pipelines

    # A file can be read at any width.
    width = None if sys.stdout.isatty() else 120
    pipelines.show_schedules(
        draw, (forward, backward, transfer), Console(width=width, highlight=False)
    )


def _run_benchmark(
    script: str,
    args: Sequence[str],
    workers: int,
    threads: int | None,
    *,
    env: Mapping[str, str] | None = None,
    **fields: Any,
) -> int:
    """Run a script of paceline/bench on workers. Its run folders are removed when it ends.

    Args:
        script: Name of the script.
        args: Its arguments.
        workers: Number of workers on this host.
        threads: Threads of each worker.
        env: Variables added to the environment.
        **fields: More fields of `LaunchRequest`.

    Returns:
        The exit code.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        request = LaunchRequest(
            str(BENCH_FOLDER / script),
            (*args, "--folder", folder),
            workers,
            threads=threads,
            **fields,
        )
        return _run_job(request, env)


@app.command()
def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN", help="A run: its folder, or its name in runs; default: the newest."
        ),
    ] = None,
    *,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a page to this file instead, with drawings; several runs are compared.",
        ),
    ] = None,
) -> None:
    """Report where the time of a run went, and what to do about it."""
    from paceline.observe.choosing import choose_run
    from paceline.observe.page.writing import write_page
    from paceline.observe.report import format_report as describe

    runs = [choose_run(folder) for folder in folders] if folders else [choose_run(None)]
    if html is not None:
        size = write_page(runs, html)
        typer.echo(
            f"{html}: a page of {', '.join(folder.name for folder in runs)}, {format_bytes(size)}"
        )
    elif len(runs) > 1:
        raise UsageError(
            "several runs are compared on a page: give a file for it, as in paceline report "
            "RUN RUN --html out.html"
        )
    else:
        typer.echo(describe(runs[0]))


@app.command()
def export(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run (its folder, or its name in runs), or one checkpoint."
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The file to write, such as out.safetensors.")
    ],
    *,
    part: Annotated[
        str | None,
        typer.Option(
            help="One of several models, or an object kept by run.keep; default: the only model."
        ),
    ] = None,
    best: options.Best = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write the model of a run's newest or best checkpoint to one safetensors file."""
    from paceline.checkpoint.files.export import export_model as write
    from paceline.observe.choosing import choose_run

    checkpoint = write(
        choose_run(folder),
        out,
        part,
        best=best,
        force=force,
        say=lambda text: typer.echo(f"paceline: {text}", err=True),
    )
    typer.echo(
        f"{out}: the model of {checkpoint.path} at step {checkpoint.step}, "
        f"{format_bytes(out.stat().st_size)}"
    )


def main() -> None:
    """Run the command `paceline`.

    Exits with code 2 after a mistake of the user, and with 1 after any other error of paceline.
    """
    # First of all: sockets would get the numbers of closed standard streams, as under cron.
    output.open_missing_streams()
    # Typer turns its own errors into exit codes. Errors of paceline become one line each.
    try:
        app()
    except PacelineError as error:
        typer.echo(f"paceline: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
