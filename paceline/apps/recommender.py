"""Trains a recommender on a log of clicks: a small DLRM (Naumov et al. 2019) with tables on
servers.

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

WIDTH = 64
ROW_STD = 0.1  # of the first values of rows
LEARNING_RATES = {"sgd": 0.1, "adagrad": 0.05}


class Recommender(nn.Module):
    """A DLRM: bags of ids and numbers in, the logit of a click out.

    `tables`: one for each kind of id, EmbeddingBag or alike.
    """

    def __init__(self, tables: Sequence[nn.Module], dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        count = 1 + len(tables)
        self.bottom = nn.Sequential(
            nn.Linear(NUMBER_FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, dim)
        )
        self.top = nn.Sequential(
            nn.Linear(count * dim + count * (count - 1) // 2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )
        self._pairs = torch.triu_indices(count, count, 1).unbind()

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """Compute the logits of samples, with the arguments of `ClickBatch`."""
        parts = [self.bottom(numbers)] + [
            table(ids[:, column]) for column, table in enumerate(self.tables)
        ]
        whole = torch.stack(parts, dim=1)
        one, other = self._pairs
        products = (whole @ whole.transpose(1, 2))[:, one, other]
        logits: Tensor = self.top(torch.cat([whole.flatten(1), products], dim=1))[:, 0]
        return logits

    def prefetch(self, batch: ClickBatch | None) -> None:
        """Announce the ids of the next batch."""
        for column, table in enumerate(self.tables if batch is not None else ()):
            if isinstance(table, pl.SparseEmbedding):
                assert batch is not None
                table.prefetch(batch.ids[:, column])


def build_model(
    log: ClickLog, dim: int, *, served: bool, servers: int | None, replicas: int | None = None
) -> Recommender:
    """Make the same model in every process, with tables on servers or on each worker; both begin
    with the same numbers.
    """
    given: dict[str, Any] = {"std": ROW_STD, "servers": servers, "replicas": replicas}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        seeds = range(100, 100 + log.tables)
        tables = [
            pl.SparseEmbedding(log.rows, dim, seed=seed, **given)
            if served
            else _make_bag(log.rows, dim, seed)
            for seed in seeds
        ]
        return Recommender(tables, dim)


def _make_bag(rows: int, dim: int, seed: int) -> nn.EmbeddingBag:
    weight = make_initial_values(torch.arange(rows), dim, torch.float32, seed=seed, std=ROW_STD)
    return nn.EmbeddingBag(rows, dim, mode="mean", _weight=weight)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make one optimizer for everything: the tables are in it, too."""
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    made: torch.optim.Optimizer = kinds[name](model.parameters(), lr=LEARNING_RATES[name])
    return made


def compute_loss(logits: Tensor, clicked: Tensor) -> Tensor:
    """Compute the loss that is trained on."""
    return F.binary_cross_entropy_with_logits(logits, clicked)


@torch.no_grad()
def evaluate_auc(run: pl.Run, model: nn.Module, loader: DataLoader[ClickBatch]) -> float:
    """Compute the AUC over all of `loader`, whichever worker saw which samples."""
    scored = [
        (run.gather(model(numbers, ids)), run.gather(clicked)) for numbers, ids, clicked in loader
    ]
    return compute_auc(
        torch.cat([scores for scores, _ in scored]), torch.cat([clicked for _, clicked in scored])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=4, help="kinds of ids (default %(default)s)")
    parser.add_argument(
        "--rows", type=int, default=100_000, help="of each table (default %(default)s)"
    )
    parser.add_argument("--dim", type=int, default=16, help="of each row (default %(default)s)")
    parser.add_argument(
        "--bag", type=int, default=2, help="ids of each kind in a sample (default %(default)s)"
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
        help="samples that the AUC is taken of (default %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=sorted(LEARNING_RATES),
        default="adagrad",
        help="of everything (default %(default)s)",
    )
    parser.add_argument(
        "--dense-by",
        choices=("allreduce", "server"),
        default="allreduce",
        help="how the layers agree",
    )
    parser.add_argument(
        "--tables-by",
        choices=("server", "worker"),
        default="server",
        help="where tables are: worker is nn.EmbeddingBag",
    )
    parser.add_argument("--servers", type=int, default=None, help="default: one on each host")
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        help="servers that keep the same, with paceline run --min-workers",
    )
    parser.add_argument(
        "--staleness",
        type=float,
        default=0,
        help="turns that a worker may be ahead, with --dense-by server; inf: any",
    )
    parser.add_argument(
        "--backup-workers",
        type=int,
        default=0,
        help="how many a step doesn't wait for, with --dense-by server",
    )
    parser.add_argument(
        "--prefetch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for the next batch's rows early",
    )
    parser.add_argument("--name", default=None, help="name of the run folder")
    parser.add_argument("--folder", default="runs", help="where run folders are")
    options = parser.parse_args()
    if (options.staleness or options.backup_workers) and options.dense_by != "server":
        parser.error("--staleness and --backup-workers are for --dense-by server")

    log, samples = (
        ClickLog(options.tables, options.rows, options.bag),
        options.steps * options.batch,
    )
    layers: Strategy = pl.AllReduce()
    if options.dense_by == "server":
        layers = ParameterServer(
            options.servers, options.staleness, options.backup_workers, replicas=options.replicas
        )
    with pl.start(
        layers, name=options.name, folder=options.folder, total_steps=options.steps
    ) as run:
        served = options.tables_by == "server"
        model = build_model(
            log, options.dim, served=served, servers=options.servers, replicas=options.replicas
        )
        optimizer = make_optimizer(options.optimizer, model)
        train, held_out = (
            ClickSamples(log, 0, samples).make_loader(options.batch),
            ClickSamples(log, samples, options.held_out).make_loader(2048),
        )
        model, optimizer, train, held_out = run.prepare(model, optimizer, train, held_out)
        for numbers, ids, clicked in train:
            loss = compute_loss(model(numbers, ids), clicked)
            if options.prefetch:
                model.prefetch(train.peek())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        run.results["auc"] = evaluate_auc(run, model, held_out)
        memory = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3])
        run.results["worker_memory_mb"] = float(run.gather(memory).max())
        run.print(
            f"AUC {run.results['auc']:.4f} on {options.held_out} samples after {samples}; "
            f"{run.results['worker_memory_mb']:.0f} MB"
        )


if __name__ == "__main__":
    main()
