"""Images become the bytes that were meant, and PNGs that others read."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.record.logged.image import Pixels, image

PIL = pytest.importorskip("PIL.Image")


def shown(pixels: Tensor, **options: tuple[float, float]) -> list[object]:
    return image(pixels, **options).to_compact_tensor()[..., 0].tolist()


def test_numbers_become_bytes() -> None:
    assert shown(torch.tensor([[0.0, 0.5], [1.0, 2.0]])) == [[0, 128], [255, 255]]
    assert shown(torch.tensor([[-1.0, 0.0, 1.0, float("nan")]]), span=(-1.0, 1.0)) == [
        [0, 128, 255, 0]
    ]
    assert shown(torch.tensor([[True, False]])) == [[255, 0]]
    assert shown(torch.tensor([[-3, 7, 300]])) == [[0, 7, 255]]
    assert shown(torch.tensor([[3, 250]], dtype=torch.uint8)) == [[3, 250]]


def test_images_lie_side_by_side() -> None:
    images = torch.stack([torch.full((1, 1, 2), value, dtype=torch.uint8) for value in (1, 2, 3)])
    assert shown(images) == [[1, 1, 0, 0, 2, 2], [0] * 6, [0] * 6, [3, 3, 0, 0, 0, 0]]


def test_it_keeps_what_the_tensor_was() -> None:
    pixels = torch.zeros(1, 2, 2, dtype=torch.uint8)
    kept = image(pixels).to_compact_tensor()
    pixels += 9
    assert kept.sum() == 0


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_others_read_the_png(channels: int, mode: str) -> None:
    pixels = torch.randint(
        0, 256, (channels, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    kept = Pixels.from_tensor(image(pixels).to_compact_tensor())
    found = PIL.open(io.BytesIO(kept.to_png()))
    assert (found.mode, found.size) == (mode, (7, 5))
    assert np.array_equal(
        np.asarray(found).reshape(5, 7, channels), pixels.permute(1, 2, 0).numpy()
    )
    assert kept.to_png() is kept.to_png()
    assert kept.to_fields() == {"kind": "image", "width": 7, "height": 5}


@pytest.mark.parametrize("shape", [(3,), (2, 5, 5), (5, 5, 3), (1, 2, 3, 4, 5), (3, 0, 4)])
def test_shapes_that_are_no_image_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="channels first"):
        image(torch.zeros(shape))


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="got a list"):
        image([[1.0]])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the smaller first"):
        image(torch.zeros(2, 2), span=(1.0, 1.0))
