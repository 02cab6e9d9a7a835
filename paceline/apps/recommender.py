"""Trains a recommender on a log of clicks: a small DLRM (Naumov et al. 2019), tables on servers.

    python -m paceline.apps.recommender [--rows 10000000 --servers 2]

It runs under any launcher of several workers, too.

    numbers -> bottom ---+-- all pairs' products --+
    ids -> tables -------+-------------------------+-> top -> clicked?

summary.json has the AUC on samples that come later in the log.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline as pl
from paceline.apps.clicks import NUMBER_FEATURES, ClickBatch, ClickLog, ClickSamples, compute_auc
from paceline.servers.process.row_optimizers import make_initial_values
from paceline.servers.worker.strategy import ParameterServer
from paceline.sync.base import Strategy

WIDTH = 64  # of the hidden layers
ROW_STD = 0.1  # standard deviation of the initial values of rows
LEARNING_RATES = {"sgd": 0.1, "adagrad": 0.05}


class Recommender(nn.Module):
    """A DLRM: numbers and bags of ids in, the logit of a click out.

    Args:
        tables: One module for each table, such as nn.EmbeddingBag.
        dim: Size of the vectors of rows.
    """

    def __init__(self, tables: Sequence[nn.Module], dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        count = 1 + len(tables)  # vectors of a sample: one of its numbers, and one of each table
        self.bottom = nn.Sequential(
            nn.Linear(NUMBER_FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, dim)
        )
        self.top = nn.Sequential(
            nn.Linear(count * dim + count * (count - 1) // 2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )
        self._pairs = torch.triu_indices(count, count, 1).unbind()

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """Compute the logits of some samples. The arguments are fields of `ClickBatch`."""
        vectors = [self.bottom(numbers)] + [
            table(ids[:, column]) for column, table in enumerate(self.tables)
        ]
        # The dot product of each pair of vectors tells how two features work together.
        stacked = torch.stack(vectors, dim=1)
        first, second = self._pairs
        products = (stacked @ stacked.transpose(1, 2))[:, first, second]
        logits: Tensor = self.top(torch.cat([stacked.flatten(1), products], dim=1))[:, 0]
        return logits

    def prefetch(self, batch: ClickBatch | None) -> None:
        """Ask the servers for the rows of the next batch. None: there is no further batch."""
        for column, table in enumerate(self.tables if batch is not None else ()):
            if isinstance(table, pl.SparseEmbedding):
                assert batch is not None
                table.prefetch(batch.ids[:, column])


def build_model(
    log: ClickLog, dim: int, *, served: bool, servers: int | None, replicas: int | None = None
) -> Recommender:
    """Make the same model in every process.

    Args:
        log: Parameters of the click log.
        dim: Size of the vectors of rows.
        served: Whether tables are on servers. Otherwise each worker has whole tables, with the same
            initial values.
        servers: Number of servers. None: one on each host.
        replicas: Number of servers that have the same rows. Default: chosen by `SparseEmbedding`.
    """
    table_options: dict[str, Any] = {"std": ROW_STD, "servers": servers, "replicas": replicas}
    # The same seed on all workers, without a change of the global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        seeds = range(100, 100 + log.tables)
        tables = [
            pl.SparseEmbedding(log.rows, dim, seed=seed, **table_options)
            if served
            else _make_bag(log.rows, dim, seed)
            for seed in seeds
        ]
        return Recommender(tables, dim)


def _make_bag(rows: int, dim: int, seed: int) -> nn.EmbeddingBag:
    weight = make_initial_values(torch.arange(rows), dim, torch.float32, seed=seed, std=ROW_STD)
    return nn.EmbeddingBag(rows, dim, mode="mean", _weight=weight)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make one optimizer for all parameters, tables included. `name` is "sgd" or "adagrad"."""
    classes: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    optimizer: torch.optim.Optimizer = classes[name](model.parameters(), lr=LEARNING_RATES[name])
    return optimizer


def compute_loss(logits: Tensor, clicked: Tensor) -> Tensor:
    """Compute the training loss."""
    return F.binary_cross_entropy_with_logits(logits, clicked)


@torch.no_grad()
def evaluate_auc(run: pl.Run, model: nn.Module, loader: DataLoader[ClickBatch]) -> float:
    """Compute the AUC over a whole data set. Collective.

    Args:
        run: The run.
        model: The prepared model.
        loader: The prepared loader. Each worker sees some of its samples.
    """
    batches = [
        (run.gather(model(numbers, ids)), run.gather(clicked)) for numbers, ids, clicked in loader
    ]
    return compute_auc(
        torch.cat([scores for scores, _ in batches]), torch.cat([clicked for _, clicked in batches])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=4, help="tables (default %(default)s)")
    parser.add_argument(
        "--rows", type=int, default=100_000, help="rows of each table (default %(default)s)"
    )
    parser.add_argument("--dim", type=int, default=16, help="size of rows (default %(default)s)")
    parser.add_argument(
        "--bag", type=int, default=2, help="ids of each table in a sample (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="steps to train (default %(default)s)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=1024,
        help="samples of a step, of all workers together (default %(default)s)",
    )
    parser.add_argument(
        "--held-out",
        type=int,
        default=16_384,
        help="number of samples for the AUC (default %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=sorted(LEARNING_RATES),
        default="adagrad",
        help="optimizer of all parameters (default %(default)s)",
    )
    parser.add_argument(
        "--dense-by",
        choices=("allreduce", "server"),
        default="allreduce",
        help="how gradients of the layers are exchanged",
    )
    parser.add_argument(
        "--tables-by",
        choices=("server", "worker"),
        default="server",
        help="where the tables are: on servers, or whole on each worker (nn.EmbeddingBag)",
    )
    parser.add_argument("--servers", type=int, default=None, help="default: one on each host")
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        help="number of servers that have the same rows, with paceline run --min-workers",
    )
    parser.add_argument(
        "--staleness",
        type=float,
        default=0,
        help="turns by which a worker may be ahead, with --dense-by server; inf: any number",
    )
    parser.add_argument(
        "--backup-workers",
        type=int,
        default=0,
        help="number of workers that a step doesn't wait for, with --dense-by server",
    )
    parser.add_argument(
        "--prefetch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for the rows of the next batch early",
    )
    parser.add_argument("--name", default=None, help="name of the run folder")
    parser.add_argument("--folder", default="runs", help="folder of the run folders")
    options = parser.parse_args()
    if (options.staleness or options.backup_workers) and options.dense_by != "server":
        parser.error("--staleness and --backup-workers need --dense-by server")

    # Validation samples follow after all training samples.
    log = ClickLog(options.tables, options.rows, options.bag)
    samples = options.steps * options.batch
    strategy: Strategy = pl.AllReduce()
    if options.dense_by == "server":
        strategy = ParameterServer(
            options.servers, options.staleness, options.backup_workers, replicas=options.replicas
        )
    with pl.start(
        strategy, name=options.name, folder=options.folder, total_steps=options.steps
    ) as run:
        served = options.tables_by == "server"
        model = build_model(
            log, options.dim, served=served, servers=options.servers, replicas=options.replicas
        )
        optimizer = make_optimizer(options.optimizer, model)
        train = ClickSamples(log, 0, samples).make_loader(options.batch)
        held_out = ClickSamples(log, samples, options.held_out).make_loader(2048)
        model, optimizer, train, held_out = run.prepare(model, optimizer, train, held_out)
        for numbers, ids, clicked in train:
            loss = compute_loss(model(numbers, ids), clicked)
            # Rows of the next batch arrive while the gradients of this one are computed.
            if options.prefetch:
                model.prefetch(train.peek())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        run.results["auc"] = evaluate_auc(run, model, held_out)
        # ru_maxrss is in KB.
        memory = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3])
        run.results["worker_memory_mb"] = float(run.gather(memory).max())
        run.print(
            f"AUC {run.results['auc']:.4f} on {options.held_out} samples after {samples}; "
            f"{run.results['worker_memory_mb']:.0f} MB"
        )


if __name__ == "__main__":
    main()
