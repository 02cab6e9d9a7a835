"""Every codec and every strategy on hosts that are apart; and bytes, as the links count them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab.hosts import Cluster
from tests.harness import every_strategy

pytestmark = pytest.mark.slow
STEPS = 9  # more than twice the longest round, and than `after` begins


INSIDE = {  # on processes, and part of others here
    *(
        "half",
        "int8",
        "chance",
        "int4",
        "topk",
        "randomk",
        "composed",
        "powersgd",
        "powersgd-int8",
        "after",
    ),
    *("every-1", "diloco-plain", "streaming", "full"),
}


def test_on_hosts(build: Callable[..., Cluster], tmp_path: Path) -> None:
    ways = {name: notation for name, notation in every_strategy.WAYS.items() if name not in INSIDE}
    cluster = build(hosts=2, workers=2, bandwidth="1gbit")
    outcome = cluster.run(
        every_strategy.__file__,
        str(tmp_path),
        every_strategy.ask(tmp_path, ways, steps=STEPS),
        deadline=200,
    )
    assert outcome.code == 0, outcome.output
    every_strategy.check(tmp_path, 4, STEPS, ways)


COUNTED = {
    "int8": "AllReduce(codec=int8())",
    "powersgd": "AllReduce(codec=error_feedback(powersgd(64)))",
    "local": "LocalSGD(every=1, codec=half())",
    # the same bytes in each step: the first one isn't counted on the links
    "gossip": "Gossip(graph='ring')",
}


def test_bytes_are_those_that_the_links_count(
    build: Callable[..., Cluster], tmp_path: Path
) -> None:
    steps = 6  # what is sent is the same in each but the first
    asked = every_strategy.ask(tmp_path, COUNTED, width=1000, steps=steps)
    outcome = build(hosts=2, workers=2, bandwidth="1gbit").run(
        every_strategy.__file__, str(tmp_path), asked, deadline=200
    )
    assert outcome.code == 0, outcome.output
    for name in COUNTED:
        found = every_strategy.seen(tmp_path, name, 4)
        counted = sum({worker["host"]: worker["left"] for worker in found}.values()) / (steps - 1)
        said = json.loads((tmp_path / name / "summary.json").read_text())["bytes_sent"]["between"]
        assert said == pytest.approx(counted, rel=0.03), (
            f"{name}: the summary says {said:.0f} bytes a step, the links {counted:.0f}"
        )


def test_auto_takes_a_codec_on_a_slow_link_and_none_on_a_quick_one(
    build: Callable[..., Cluster], tmp_path: Path
) -> None:
    def takes_codec(rate: str, folder: Path) -> bool:
        folder.mkdir()
        asked = every_strategy.ask(folder, {"auto": "AllReduce(codec='auto')"}, width=500, steps=16)
        outcome = build(hosts=2, workers=1, bandwidth=rate).run(
            every_strategy.__file__, str(folder), asked, deadline=100
        )
        assert outcome.code == 0, outcome.output
        taken = "which is taken from step" in outcome.output
        summary = json.loads((folder / "auto" / "summary.json").read_text())
        assert bool(summary["codecs"]) == taken, outcome.output
        return taken

    assert takes_codec("100mbit", tmp_path / "slow")
    # The choice is made by eight measured steps. On a machine that is busy just then a quick link
    # is a slow one, so a quick link has three tries.
    assert not all(takes_codec("10gbit", tmp_path / f"quick-{n}") for n in range(3))
