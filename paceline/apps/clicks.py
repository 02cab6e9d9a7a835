"""A synthetic click log, which is made when it is read.

    sample n   8 numbers, normal                           features of a user's visit
               a bag of ids of each table, Zipf            id k is 1 / (k + 1) as frequent as id 0
               clicked, or not                             with the probability sigmoid(numbers +
                                                           ids + pairs of ids)

Sample n depends on n alone, so there is no file and no last sample. Each id has a hidden weight and
a hidden vector, and pairs of tables add the product of their vectors. A model has to learn them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.servers.process.row_optimizers import make_initial_values, mix_bits

NUMBER_FEATURES = 8  # numbers in each sample
HIDDEN_DIM = 4  # size of the hidden vector of an id


class ClickBatch(NamedTuple):
    """Some samples of a click log.

    Attributes:
        numbers: Features, (samples, NUMBER_FEATURES).
        ids: Ids of each table, (samples, tables, ids of a bag).
        clicked: Labels, 0 or 1, (samples).
    """

    numbers: Tensor
    ids: Tensor
    clicked: Tensor


@dataclass(frozen=True)
class ClickLog:
    """Parameters of a click log.

    Attributes:
        tables: Number of tables.
        rows: Number of rows in each table.
        bag: Number of ids of each table in a sample.
    """

    tables: int = 4
    rows: int = 100_000
    bag: int = 2

    def read_samples(self, samples: Tensor) -> ClickBatch:
        """Make the samples with these indices (int64)."""
        numbers = make_initial_values(samples, NUMBER_FEATURES, torch.float64, seed=1, std=1.0)
        ids = self._draw_ids(samples)
        chance = _make_uniform(mix_bits(samples.numpy().astype(np.uint64) + np.uint64(3 << 40)))
        clicked = torch.from_numpy(chance) < self._compute_logits(numbers, ids).sigmoid()
        return ClickBatch(numbers.float(), ids, clicked.float())

    def _draw_ids(self, samples: Tensor) -> Tensor:
        """Draw ids log-uniformly: half of them are below the square root of `rows`."""
        # Each id has its own random bits, which depend on its place in the log alone.
        width = self.tables * self.bag
        places = samples.numpy().astype(np.uint64)[:, None] * np.uint64(width) + np.arange(
            width, dtype=np.uint64
        )
        ids = (
            np.exp(_make_uniform(mix_bits(places + np.uint64(2 << 40))) * math.log(self.rows + 1))
            - 1
        )
        return torch.from_numpy(ids.astype(np.int64).clip(0, self.rows - 1)).view(
            -1, self.tables, self.bag
        )

    def _compute_logits(self, numbers: Tensor, ids: Tensor) -> Tensor:
        # For each table the mean over the bag of [weight, *vector], (samples, 1 + HIDDEN_DIM).
        hidden = [
            make_initial_values(
                ids[:, table].reshape(-1), 1 + HIDDEN_DIM, torch.float64, seed=100 + table, std=1.0
            )
            .view(len(ids), self.bag, -1)
            .mean(1)
            for table in range(self.tables)
        ]
        products = [(one[:, 1:] * other[:, 1:]).sum(1) for one, other in combinations(hidden, 2)]
        logit = -0.5 + numbers[:, 0] - 0.5 * numbers[:, 1] + sum(values[:, 0] for values in hidden)
        return logit + (torch.stack(products).mean(0) if products else 0)


class ClickSamples(Dataset[Any]):
    """A data set of consecutive samples of a log, which are read one batch at a time.

    Args:
        log: Parameters of the log.
        first: Index of the first sample.
        count: Number of samples.
    """

    def __init__(self, log: ClickLog, first: int, count: int) -> None:
        self._log, self._first, self._count = log, first, count

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, indices: Sequence[int]) -> ClickBatch:
        """Make all samples of a batch at once."""
        return self._log.read_samples(torch.tensor(indices, dtype=torch.int64) + self._first)

    def make_loader(self, batch: int) -> DataLoader[ClickBatch]:
        """Make a DataLoader of these samples, in the order of the log."""
        return DataLoader(self, batch, collate_fn=_keep_batch)


def _keep_batch(batch: Any) -> Any:
    return batch


def _make_uniform(words: Any) -> Any:
    """Make numbers from 0 to 1 of words of 64 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def compute_auc(scores: Tensor, clicked: Tensor) -> float:
    """Compute the area under the ROC curve.

    It is the probability that a clicked sample scores higher than one that isn't clicked. Ties
    count half. The result is nan if all samples have the same label.
    """
    # Rank the scores from 1 on. Equal scores share the mean of their ranks.
    _, places, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2.0)[places]
    hits, misses = float(clicked.sum()), float((1 - clicked).sum())
    if not hits or not misses:
        return math.nan
    return (float((ranks * clicked).sum()) - hits * (hits + 1) / 2) / (hits * misses)
