"""Layers on several workers, without micro-batches."""

from __future__ import annotations

import pytest

from paceline import notation
from paceline.errors import NotationError
from paceline.parallel.layers import layers
from tests.harness.pipelines import LAYERS, same


def test_layers_on_two_workers_end_where_one_process_does() -> None:
    same("stage=2", layers(LAYERS))
    same("stage=2", layers("auto", split=[1, 7]))


def test_the_notation_gives_what_was_written() -> None:
    cut = layers(LAYERS, split=[3, 5])
    assert notation.parse_cuts(repr(cut)) == (layers(LAYERS, split=[3, 5]),)
    with pytest.raises(NotationError):
        notation.parse_cuts("layers(nam='x')")
