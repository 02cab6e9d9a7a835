from __future__ import annotations

import pytest
import torch

from paceline.codec.coding import make_message
from paceline.codec.sparse import randomk, topk
from paceline.errors import UsageError
from tests.harness.codings import data, sent


@pytest.mark.parametrize("threshold", ["exact", "sampled"])
@pytest.mark.parametrize(
    ("numel", "fraction"), [(1, 0.01), (50, 0.01), (1000, 0.1), (300_000, 0.01), (300_000, 1.0)]
)
def test_the_largest_arrive_as_they_are(numel: int, fraction: float, threshold: str) -> None:
    x = data(numel)
    out = sent(topk(fraction, threshold=threshold), x)[0]  # type: ignore[arg-type]
    count = max(1, round(fraction * numel))
    kept = out.nonzero().view(-1)
    assert kept.numel() == count and torch.equal(out[kept], x[kept])
    if threshold == "exact" or numel < 30_000:
        assert float(x.abs()[kept].min()) == float(torch.topk(x.abs(), count).values.min())
    best = torch.topk(x.abs(), count).values.square().sum()
    assert float(out.square().sum()) >= 0.999 * float(best)


def test_a_sample_that_misleads_sends_fewer_and_stays_right() -> None:
    x = data(320_000) * 1e-3
    x[:: 320_000 // (16 << 10)] = 100.0  # exactly what is sampled
    out = sent(topk(0.2, threshold="sampled"), x)[0]
    kept = out.nonzero().view(-1)
    assert 16_000 <= kept.numel() <= 64_000 and torch.equal(out[kept], x[kept])


def test_all_equal() -> None:
    x = torch.ones(300_000)
    for threshold in ("exact", "sampled"):
        assert float(sent(topk(0.01, threshold=threshold), x)[0].sum()) == 3000  # type: ignore[arg-type]


def test_randomk_draws_others_each_time_and_each_as_often() -> None:
    x, coding = torch.ones(1000), randomk(0.07)
    counts = torch.zeros(1000)
    for seed in range(1000):
        out = sent(coding, x, seed)[0]
        assert int(out.sum()) == 70
        counts += out
    assert float(counts.min()) > 35 and float(counts.max()) < 120
    assert randomk(1.0).layout(10)[1].numel == 10 and torch.equal(
        sent(randomk(1.0), data(10))[0], data(10)
    )


def test_without_a_generator_torchs_own_is_used() -> None:
    whole, message = make_message(randomk(0.5), 100)
    randomk(0.5).encode(data(100), message)
    seed = int(message[0])
    randomk(0.5).encode(data(100), message)
    assert int(message[0]) != seed and whole.numel() == 8 + 4 * 50


@pytest.mark.parametrize("fraction", [0, -1, 1.5, float("nan")])
def test_fractions(fraction: float) -> None:
    for coding in (topk, randomk):
        with pytest.raises(UsageError, match=r"fraction is .* above 0 and at most 1"):
            coding(fraction)
    with pytest.raises(UsageError, match="threshold='guess' is unknown; possible: exact, sampled"):
        topk(0.1, threshold="guess")  # type: ignore[arg-type]
