"""The log of clicks: each sample follows from its number, ids are as skewed as is said, and
there is something to learn.
"""

from __future__ import annotations

import math

import pytest
import torch

from paceline.apps.clicks import NUMBER_FEATURES, ClickLog, ClickSamples, compute_auc

LOG = ClickLog(tables=3, rows=1000, bag=2)


def test_a_sample_follows_from_its_number() -> None:
    whole, part = LOG.read_samples(torch.arange(500)), LOG.read_samples(torch.tensor([7, 499, 3]))
    for one, other in zip(whole, part, strict=True):
        assert torch.equal(one[[7, 499, 3]], other)
    assert (
        whole.numbers.shape == (500, NUMBER_FEATURES)
        and whole.ids.shape == (500, 3, 2)
        and whole.clicked.shape == (500,)
    )


def test_ids_are_zipf() -> None:
    """Below 10 lies as much as between 100 and 1000, on a scale of logarithms."""
    ids = LOG.read_samples(torch.arange(20_000)).ids
    assert ids.min() == 0 and 900 < ids.max() < 1000
    for table in range(3):
        counts = torch.bincount(ids[:, table].flatten(), minlength=1000)
        assert float(counts[0]) / ids[:, table].numel() == pytest.approx(
            math.log(2) / math.log(1001), rel=0.05
        )
        assert float(counts[:9].sum()) == pytest.approx(float(counts[99:].sum()), rel=0.1)
    assert not torch.equal(ids[:, 0], ids[:, 1])


def test_a_loader_gives_the_log_in_order() -> None:
    found = list(ClickSamples(LOG, 100, 10).make_loader(4))
    assert [len(batch.clicked) for batch in found] == [4, 4, 2]
    assert torch.equal(
        torch.cat([batch.ids for batch in found]), LOG.read_samples(torch.arange(100, 110)).ids
    )


def test_there_is_something_to_learn() -> None:
    """Who knew the hidden weights and vectors would be far better than who guesses; the numbers
    alone are in between.
    """
    batch = LOG.read_samples(torch.arange(20_000))
    hidden = LOG._compute_logits(batch.numbers.double(), batch.ids)
    best, some = (
        compute_auc(hidden, batch.clicked),
        compute_auc(batch.numbers[:, 0] - 0.5 * batch.numbers[:, 1], batch.clicked),
    )
    assert 0.8 < best < 0.95 and 0.6 < some < best - 0.05
    assert 0.3 < float(batch.clicked.mean()) < 0.5


class TestAuc:
    def test_against_all_pairs(self) -> None:
        generator = torch.Generator().manual_seed(1)
        scores = torch.randint(0, 20, (300,), generator=generator).float()
        clicked = (torch.rand(300, generator=generator) * 20 < scores).float()
        hits, misses = scores[clicked > 0], scores[clicked == 0]
        pairs = (hits[:, None] > misses).double() + (hits[:, None] == misses).double() / 2
        assert compute_auc(scores, clicked) == pytest.approx(float(pairs.mean()), abs=1e-12)

    def test_at_its_ends(self) -> None:
        assert compute_auc(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])) == 1
        assert compute_auc(torch.tensor([2.0, 1.0]), torch.tensor([0.0, 1.0])) == 0
        assert compute_auc(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])) == 0.5
        assert math.isnan(compute_auc(torch.tensor([1.0]), torch.tensor([1.0])))
