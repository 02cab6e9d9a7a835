"""Histograms and images are held, kept with a checkpoint, and come out as they were."""

from __future__ import annotations

import torch

from paceline.record.logged.histogram import HistogramCounts, histogram
from paceline.record.logged.image import Pixels, image
from paceline.record.logged.media import HeldMedia
from paceline.state.snapshot import make_snapshot, snapshot_from_bytes


def test_what_is_held_comes_out() -> None:
    found = HeldMedia.hold_media(histogram(torch.tensor([1.0, 2.0]), 2)).read_content()
    assert found == HistogramCounts(1.0, 2.0, 2, 0, 3.0, 5.0, (1, 1))


def test_a_checkpoint_keeps_it() -> None:
    shown = (
        HeldMedia.hold_media(image(torch.ones(1, 2, 2))),
        HeldMedia.hold_media(histogram(torch.tensor([1.0, 2.0]), 2)),
    )
    states = snapshot_from_bytes(
        make_snapshot([each.to_state() for each in shown]).to_bytes()
    ).unpack_state()
    pixels, counts = (HeldMedia.from_state(state).read_content() for state in states)
    assert isinstance(pixels, Pixels) and pixels.data.tolist() == [[[255], [255]]] * 2
    assert counts == shown[1].read_content()
