"""Whether a codec pays: the arithmetic, and what a run's summary says of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.codec.codec import error_feedback
from paceline.codec.dense import int4, int8
from paceline.codec.sparse import topk
from paceline.comm.group_protocol import Group
from paceline.sync.allreduce import AllReduce
from paceline.sync.codec_cost import (
    ExactRate,
    ExchangeCost,
    exposed_seconds,
    judge_codec,
    measure_exact_rate,
    relative_error,
    sample_elements,
)
from paceline.sync.gossip.strategy import Gossip
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.compressed_training import model, train
from tests.harness.runs import workers
from tests.harness.thread_groups import spawn

FACTS = {
    "codec": "int8()",
    "turns": 10,
    "sent": 1e6,
    "exact": 4e6,
    "coding": 0.01,
    "shown": 0.1,
    "exact_shown": 0.4,
    "error": 0.01,
}
FACTS |= {"link": 12.5e6, "compared": "the mean"}


def test_what_is_exposed_is_what_backward_could_not_hide() -> None:
    link = ExchangeCost(0.0, 1.0, 0.0)
    assert exposed_seconds([], [], 5.0) == 0.0
    assert exposed_seconds([0.0], [link], 5.0) == 0.0
    assert exposed_seconds([4.5], [link], 5.0) == 0.5
    # one after the other from 0 to 9
    assert exposed_seconds([0.0, 1.0, 2.0], [link._replace(link=3.0)] * 3, 5.0) == 4.0
    # in the order in which they are ready
    assert exposed_seconds([2.0, 0.0], [ExchangeCost(0, 1, 0), ExchangeCost(0, 4, 0)], 4.0) == 1.0


def test_coding_and_sending_overlap_between_buckets() -> None:
    cost = ExchangeCost(1.0, 2.0, 0.5)
    assert exposed_seconds([0.0, 0.0], [cost, cost], 0.0) == 1.0 + 2.0 + 2.0 + 0.5


@pytest.mark.parametrize("size", [2, 3])
def test_a_link_is_measured_alike_by_all(size: int) -> None:
    found = spawn(size, lambda group: measure_exact_rate(group, torch.device("cpu")))
    assert len({(rate.latency, rate.per_byte) for rate in found}) == 1
    # on a busy machine a short tensor may take as long as a long one
    assert found[0].latency >= 0 and found[0].per_byte >= 0
    assert found[0].predict_seconds(1e6) == found[0].latency + 1e6 * found[0].per_byte


def test_something_else_than_sums_can_be_measured() -> None:
    sent: list[int] = []

    def work(group: Group) -> ExactRate:
        def send(x: torch.Tensor) -> Any:
            sent.append(x.numel())
            return group.exchange([(1 - group.rank, x)], [(1 - group.rank, torch.empty_like(x))])

        return measure_exact_rate(group, torch.device("cpu"), send)

    one, other = spawn(2, work)
    assert (one.latency, one.per_byte) == (other.latency, other.per_byte) and len({*sent}) >= 2


def test_samples_move_and_errors_are_relative() -> None:
    x = torch.arange(10_000.0)
    assert len({float(sample_elements(x, 4, step)[0]) for step in range(4)}) == 4
    assert sample_elements(x, 4, 1).numel() == 2500
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])) == pytest.approx(
        1 / math.sqrt(34)
    )
    assert math.isnan(relative_error(torch.zeros(2), torch.zeros(2)))


def test_verdicts_in_words() -> None:
    verdict = judge_codec([FACTS, FACTS, None], step=0.6, steps=10)
    assert verdict is not None
    assert (verdict.bytes_sent, verdict.bytes_exact, verdict.gain) == (2e6, 8e6, pytest.approx(1.5))
    assert verdict.words == (
        "int8() sent 2 MB a step where exact sums would have sent 8 MB; "
        "coding took 10 ms of a processor, and the mean was 0.01 of its "
        "size off. On this link (100 Mbit/s out of each) 100 ms of the exchange showed, with exact "
        "sums it would be about 400 ms: it paid, "
        "steps are about 1.50 times as fast."
    )
    lost = judge_codec([FACTS | {"exact_shown": 0.04}], step=0.6, steps=10)
    assert lost is not None and lost.words.endswith(
        "it did not pay, exact sums would be about 1.11 times as fast. Leave the codec out here."
    )
    same = judge_codec([FACTS | {"exact_shown": 0.1}], step=0.6, steps=10)
    assert same is not None and same.words.endswith(
        "it made no difference to the time. Exact sums would lose nothing."
    )
    rounds = judge_codec([FACTS | {"error": math.nan}], step=0.6, steps=160)
    assert (
        rounds is not None
        and "2 MB a round" not in rounds.words
        and "1 MB a round" in rounds.words
        and "off" not in rounds.words
    )
    assert rounds.gain == pytest.approx((0.6 + 0.3 / 16) / 0.6)
    assert judge_codec([None, None], step=0.6, steps=10) is None


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "test" / "summary.json").read_text())
    return found


@pytest.mark.parametrize("hosts", [(), (0, 0, 1, 1)])
def test_a_run_says_what_its_codec_did(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    workers(4, train, strategy=AllReduce(codec=int8()), folder=tmp_path, hosts=hosts)
    (codec,) = summary(tmp_path)["codecs"]
    assert codec["codec"] == "int8()" and codec["turns"] == 20
    # scales, for so few parameters
    assert codec["bytes_sent"] == pytest.approx(codec["bytes_exact"] / 4, rel=0.3)
    assert 0 < codec["relative_error"] < 0.02
    assert (
        codec["coding_seconds"] > 0 and float(codec["link_bytes_per_second"]) > 0
    )  # "inf" on a machine so busy that a small sum took longer
    lines = [
        json.loads(line) for line in (tmp_path / "test" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum("codec_error" in line for line in lines) >= 18
    assert all(line["codec_bytes"] > 0 and line["codec_seconds"] > 0 for line in lines[1:])


def test_the_error_is_that_of_the_mean(tmp_path: Path) -> None:
    """The sample holds all elements of a small model, so the error is the true one: seen by an
    exact run beside it.
    """
    coded: list[list[torch.Tensor]] = [[] for _ in range(3)]
    plain: list[list[torch.Tensor]] = [[] for _ in range(3)]
    workers(
        3,
        lambda run: train(run, grads=coded[run.rank], epochs=1),
        strategy=AllReduce(codec=int4(block=32)),
        folder=tmp_path,
    )
    workers(3, lambda run: train(run, grads=plain[run.rank], epochs=1))
    lines = [
        json.loads(line) for line in (tmp_path / "test" / "metrics.jsonl").read_text().splitlines()
    ]
    seen = next(line["codec_error"] for line in lines if "codec_error" in line)
    right = next(
        relative_error(a, b)
        for a, b in zip(coded[0], plain[0], strict=True)
        if not torch.equal(a, b)
    )
    assert seen == pytest.approx(right, rel=0.05)


def test_rounds_have_accounts_too(tmp_path: Path) -> None:
    workers(2, train, strategy=LocalSGD(4, codec=error_feedback(topk(0.1))), folder=tmp_path)
    (codec,) = summary(tmp_path)["codecs"]
    assert codec["turns"] == 5 and " a round " in codec["words"] and codec["relative_error"] > 0.05


def test_gossip_has_an_account_of_what_neighbours_know(tmp_path: Path) -> None:
    workers(4, train, strategy=Gossip("ring", codec=int4(block=32), gamma=0.5), folder=tmp_path)
    (codec,) = summary(tmp_path)["codecs"]
    assert codec["turns"] == 20 and codec["bytes_exact"] == 4 * 2 * 4 * sum(
        p.numel() for p in model().parameters()
    )
    assert (
        0.1 < codec["bytes_sent"] / codec["bytes_exact"] < 0.3 and 0 < codec["relative_error"] < 0.1
    )
    assert "what neighbours know was " in codec["words"]
    assert codec["coding_seconds"] > 0 and codec["exact_shown_seconds"] > 0


def test_what_is_sent_is_counted_also_when_a_step_is_over(tmp_path: Path) -> None:
    workers(2, train, strategy=LocalSGD(4), folder=tmp_path, hosts=(0, 1))
    size = sum(p.numel() for p in model().parameters())
    found = sum(summary(tmp_path)["bytes_sent"].values()) * 20
    # in 5 rounds each of the two sends all of it once, and what is agreed
    assert 1 <= found / (5 * 2 * size * 4) < 1.15


def test_no_codec_no_account(tmp_path: Path) -> None:
    workers(2, train, folder=tmp_path)
    assert summary(tmp_path)["codecs"] == []
