"""Batches go to a device as a whole, in whatever they are packed."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from paceline.data.loader import deal_loader
from paceline.prepare.device import make_mover
from tests.harness.runs import alone, batches

META = torch.device("meta")


class Pair(NamedTuple):
    x: Tensor
    name: str


class Sent:
    """A batch class of a user's own."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Sent:
        return Sent(self.x.to(device))


def test_nothing_is_done_on_the_processor() -> None:
    assert make_mover(torch.device("cpu")) is None


def test_tensors_go_wherever_they_are() -> None:
    move = make_mover(META)
    assert move is not None
    x = torch.zeros(2)
    batch = {"a": [x, (x, 3)], "pair": Pair(x, "p"), "sent": Sent(x), "none": None, "text": "t"}
    found: Any = move({**batch, "map": OrderedDict(k=x), "user": UserDict(u=x)})
    assert found["a"][0].is_meta and found["a"][1][0].is_meta and found["a"][1][1] == 3
    assert isinstance(found["pair"], Pair) and found["pair"].x.is_meta and found["pair"].name == "p"
    assert found["sent"].x.is_meta and found["none"] is None and found["text"] == "t"
    assert (
        isinstance(found["map"], OrderedDict)
        and found["map"]["k"].is_meta
        and found["user"]["u"].is_meta
    )
    assert not x.is_meta and batch["a"][0] is x  # what was given stays


def test_packed_sequences_go() -> None:
    move = make_mover(META)
    assert move is not None
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    found = move([packed])[0]
    assert found.data.is_meta and not found.batch_sizes.is_meta  # as torch wants it


def test_a_dealt_loader_hands_out_moved_batches() -> None:
    def body(run: Any) -> None:
        loader = deal_loader(
            batches(),
            run._agreement,
            move=make_mover(META),
            weigh=lambda batch: float(batch[0].sum() > -1e9),
        )
        # weigh has seen them before, where reading doesn't wait
        assert all(x.is_meta and y.is_meta for x, y in loader)

    alone(body)
