"""The options of the command line that several commands have, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Workers = Annotated[int, typer.Option("--workers", "-n", help="Workers on this host.")]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads of each worker. Default: OMP_NUM_THREADS, or an equal part of the cores."
    ),
]
Script = Annotated[
    Path, typer.Argument(help="The training script. Words after it are its arguments.")
]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
Name = Annotated[
    str | None, typer.Option(help="Name of the run's folder. Default: the date and time.")
]
Servers = Annotated[
    int | None,
    typer.Option(
        help="Number of parameter servers, if the strategy has them. Default: one on each host."
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        help="With 'paceline', scripts that use torch.distributed get paceline instead of Gloo."
    ),
]
Horovod = Annotated[
    bool,
    typer.Option("--horovod", help="Let `import horovod.torch` in the script find a bridge."),
]
Sync = Annotated[
    str | None,
    typer.Option(
        help="Strategy as text, such as 'AllReduce(via=\"ring\")'. Replaces the script's strategy."
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        help="Grid of the workers, such as 'data=2, tensor=2'. Replaces the script's grid."
    ),
]
Cut = Annotated[
    str | None,
    typer.Option(
        help="Cuts of the model as text, such as 'shard(\"blocks.*\")'. Replaces the script's cuts."
    ),
]
Straggler = Annotated[
    str | None, typer.Option(help="How to treat slow workers: warn, rebalance, drop or evict.")
]
ReportTo = Annotated[
    str | None,
    typer.Option(
        help=(
            "Trackers, with commas between them: tensorboard, wandb, mlflow, prometheus, or none. "
            "Replaces the script's trackers."
        )
    ),
]
Shares = Annotated[
    str | None,
    typer.Option(
        help="Shares of each batch: auto (by speed), or one number per worker, such as '2,1'."
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="File that paceline probe wrote: routes between hosts are chosen by it.",
    ),
]
PlanToFollow = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="A plan of paceline plan: its workers, strategy and shares are used, and the run is "
        "compared with it.",
    ),
]
Watch = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Serve a page that shows the run while it trains (needs paceline[watch]).",
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option(
        help=(
            "Keep training when workers die, while at least this "
            "many workers are left on all hosts."
        )
    ),
]
Progress = Annotated[
    float | None,
    typer.Option(
        metavar="N", help="Seconds between two lines of progress, if the output shows no bar."
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", help="Print no progress and no lines of the launcher, unless something fails."
    ),
]
Hosts = Annotated[
    int, typer.Option(help="Number of hosts in the job. Run the same command on each.")
]
JobHosts = Annotated[
    int | None,
    typer.Option(
        "--hosts",
        help="Number of hosts in the job. Run the same command on each. Default: PET_NNODES, or 1.",
    ),
]
SaveOnTerm = Annotated[
    bool | None,
    typer.Option(
        "--save-on-term/--no-save-on-term",
        help="Save a checkpoint at SIGTERM, before the run ends. Default: under Kubernetes, Slurm "
        "and Ray.",
    ),
]
GraceSeconds = Annotated[
    float, typer.Option(help="Seconds that a run has to save a checkpoint after SIGTERM.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the newest checkpoint of the earlier runs with this --name, if any.",
    ),
]
Join = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address at which hosts meet: the first host, and a free port on it.",
    ),
]
HostRank = Annotated[
    int | None,
    typer.Option(help="Number of this host, from 0. Default: decided when the hosts meet."),
]
SecretFile = Annotated[
    Path | None, typer.Option(help="File with the job's secret (mode 0600), the same on each host.")
]
Interface = Annotated[
    str | None,
    typer.Option(
        help=(
            "Network interface, by name or address. Default: the interface of the route to the "
            "other hosts."
        )
    ),
]
Placement = Annotated[
    str,
    typer.Option(help="Order of ranks over hosts: block or round-robin. The same on all hosts."),
]
Dtypes = Annotated[
    str,
    typer.Option(
        help="Dtypes of the matrices that are multiplied. Name the dtypes of your training."
    ),
]
Best = Annotated[
    bool,
    typer.Option(
        "--best",
        help="Take the best checkpoint, not the newest, of a run that saved with a metric.",
    ),
]
MeasuredFile = Annotated[Path, typer.Option("--out", help="The file to write, on the first host.")]
Restarts = Annotated[
    int,
    typer.Option(
        help=(
            "Number of times that the job starts again after a loss. With --min-workers: "
            "workers that each host replaces."
        )
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        help=(
            "Seconds to wait for other hosts: with fewer workers than --min-workers, after the "
            "loss of a host, or without a connection."
        )
    ),
]
