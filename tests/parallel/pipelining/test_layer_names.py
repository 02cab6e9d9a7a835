"""Which modules names, patterns and "auto" stand for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.apps.gpt import GPT, GPTShape
from paceline.errors import UsageError
from paceline.parallel.pipelining.layer_names import choose_layers, find_layers
from tests.harness.layered_models import Listed, Looped
from tests.harness.sharded_models import OddNet

pytestmark = pytest.mark.unit


def test_patterns_stand_for_the_outermost_modules_they_match() -> None:
    found = find_layers(OddNet(), "inward, blocks.*, head")
    assert found.entries == (
        ("inward", ("inward",)),
        ("blocks.*", ("blocks.0", "blocks.1", "blocks.2")),
        ("head", ("head",)),
    )
    assert find_layers(OddNet(), ["inward", "*.2.*"]).names == (
        "inward",
        "blocks.2.0",
        "blocks.2.1",
        "blocks.2.2",
    )
    assert find_layers(OddNet(), "auto").ordered is False


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            "inwards, blocks.*",
            "'inwards' names no module of the model; the nearest names are inward",
        ),
        ("blocks.*, blocks.1", r"blocks.1 is named twice, by 'blocks.\*' and by 'blocks.1'"),
        ("blocks.*, blocks.1.0", r"blocks.1.0 .* lies inside blocks.1 \(named by 'blocks.\*'\)"),
        (
            "inward, blocks",
            r"blocks is a ModuleList, which is never called itself; write 'blocks.\*'",
        ),
        ("inward,, head", "'' names no module"),
    ],
)
def test_names_that_make_no_layers_are_refused(names: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_layers(OddNet(), names)


HALF = " ".join(["{0}.embed", *(f"{{0}}.blocks.{number}" for number in range(6)), "{0}.head"])


class Wrapped(nn.Module):
    """Two halves with lists of their own, and a head that is a short sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Looped(8, 6), Looped(8, 6)
        self.head = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def sequence(*sizes: int) -> nn.Sequential:
    return nn.Sequential(
        *(module for size in sizes for module in (nn.Linear(size, size), nn.ReLU()))
    )


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (
            GPT(GPTShape(d=8, layers=3, heads=1)),
            "tokens positions blocks.0 blocks.1 blocks.2 norm head",
        ),
        (GPT(GPTShape(d=8, layers=1, heads=1, vocab=11)), "tokens positions blocks norm head"),
        (OddNet(), "inward blocks.0.0 blocks.0.2 blocks.1.0 blocks.1.2 blocks.2.0 blocks.2.2 head"),
        (sequence(4, 4, 4), "0 2 4"),
        (Listed(), "blocks.0 blocks.1"),
        (nn.Sequential(nn.Linear(2, 4), sequence(4, 4), nn.Linear(4, 1)), "0 1.0 1.2 2"),
        (Wrapped(), f"{HALF.format('encoder')} {HALF.format('decoder')} head"),
    ],
)
def test_auto_takes_members_of_containers_and_what_stands_around_them(
    model: nn.Module, layers: str
) -> None:
    assert list(choose_layers(model)) == layers.split()


def test_lists_of_parameters_are_no_layers() -> None:
    with pytest.raises(
        UsageError, match="shifts is a ParameterDict, which is never called itself; leave it out"
    ):
        find_layers(Listed(), "blocks.*, shifts")


def test_auto_finds_nothing_in_a_model_of_one_piece() -> None:
    with pytest.raises(UsageError, match='"auto" finds no layers in Bilinear'):
        list(choose_layers(nn.Bilinear(2, 2, 2)))


def test_a_model_without_memory_has_layers_too() -> None:
    with torch.device("meta"):
        assert "blocks.1" in list(choose_layers(GPT(GPTShape(d=8, layers=2, heads=1))))
