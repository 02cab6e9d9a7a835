"""The options of the command line that several commands have, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Workers = Annotated[int, typer.Option("--workers", "-n", help="Workers on this host.")]
Threads = Annotated[int | None, typer.Option(help="Threads of each worker; default: its part of the cores, or OMP_NUM_THREADS.")]
Script = Annotated[Path, typer.Argument(help="The training script; what stands after it belongs to the script.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
Name = Annotated[str | None, typer.Option(help="Name of the run folder; default: the date and time.")]
Servers = Annotated[int | None, typer.Option(help="Parameter servers, for a strategy that has them; default: one on each host.")]
Backend = Annotated[str | None, typer.Option(help="For scripts that use torch.distributed: 'paceline' is what they get instead of Gloo.")]
Sync = Annotated[str | None, typer.Option(help="Strategy as text, such as 'AllReduce(via=\"ring\")'; replaces the script's own.")]
Mesh = Annotated[str | None, typer.Option(help="The workers as a grid, such as 'data=2, tensor=2'; replaces the script's own.")]
Cut = Annotated[str | None, typer.Option(help="Cuts of the model as text, such as 'shard(\"blocks.*\")'; they replace the script's own.")]
Straggler = Annotated[str | None, typer.Option(help="What is done about slow workers: warn, rebalance, drop or evict.")]
ReportTo = Annotated[
    str | None,
    typer.Option(
        help="Where the run is reported to: tensorboard, wandb, mlflow, prometheus or none; several with commas. Replaces the script's."
    ),
]
Shares = Annotated[str | None, typer.Option(help="Shares of each batch: auto (by speed), or one number per worker, such as '2,1'.")]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="What paceline probe has measured here: ways between hosts are chosen by it."),
]
Watch = Annotated[
    str | None, typer.Option(metavar="[HOST:]PORT", help="Serve a page that shows the run while it trains (needs paceline[watch]).")
]
MinWorkers = Annotated[int | None, typer.Option(help="Go on when workers die, as long as there are so many in all.")]
Progress = Annotated[float | None, typer.Option(metavar="N", help="Seconds between two lines on the progress, where it is no bar.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing of what goes well: no progress, and no lines of the launcher's own.")]
Hosts = Annotated[int, typer.Option(help="Hosts in the job; run the same line on each.")]
Join = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where hosts meet: the first host, and a free port there.")]
HostRank = Annotated[int | None, typer.Option(help="Number of this host, from 0; default: found out when they meet.")]
SecretFile = Annotated[Path | None, typer.Option(help="The job's secret (mode 0600), the same on every host.")]
Nic = Annotated[str | None, typer.Option(help="Network interface, by name or address; default: the route to the others.")]
Dealing = Annotated[str, typer.Option(help="How ranks are dealt to hosts: block, or round-robin; the same on all hosts.")]
Dtypes = Annotated[str, typer.Option(help="Dtypes of the matrices that are multiplied: those that the training uses.")]
Best = Annotated[bool, typer.Option("--best", help="The best checkpoint in the place of the newest, of a run that has saved by a metric.")]
Measured = Annotated[Path, typer.Option("--out", help="The file to write, on the first host.")]
Restarts = Annotated[
    int, typer.Option(help="How often workers of all hosts start again after a loss; with --min-workers: how many of each host.")
]
Patience = Annotated[
    float, typer.Option(help="Seconds to wait for others: below --min-workers, after the loss of a host, or when cut off from the others.")
]
