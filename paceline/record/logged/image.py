"""Images that are logged: a tensor becomes bytes of pixels on its device, and a PNG where it is
written.
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import UsageError

_CHANNELS: Final = (1, 3, 4)  # grey, colour, and colour with opacity
_KINDS: Final = {1: 0, 3: 2, 4: 6}  # channels: the colour type of PNG
_GAP: Final = 2  # pixels between images side by side


@dataclass(frozen=True)
class Image:
    """Pixels that are logged as an image; `span`: the numbers that mean black and white, where
    they aren't integers.
    """

    pixels: Tensor
    span: tuple[float, float] = (0.0, 1.0)

    def compact(self) -> Tensor:
        """Return the pixels as bytes (height, width, channels), where the tensor is and without
        waiting for it.
        """
        pixels = self.pixels.detach()
        if pixels.dtype == torch.bool:
            pixels = pixels.to(torch.uint8) * 255
        elif pixels.is_floating_point():
            low, high = self.span
            pixels = (
                ((pixels.to(torch.float32) - low) / (high - low))
                .nan_to_num()
                .clamp(0, 1)
                .mul(255)
                .round()
            )
        elif pixels.dtype != torch.uint8:
            pixels = pixels.clamp(0, 255)
        pixels = pixels.to(torch.uint8)
        pixels = pixels[None] if pixels.dim() == 2 else pixels
        pixels = _side_by_side(pixels) if pixels.dim() == 4 else pixels
        return pixels.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)


def _side_by_side(images: Tensor) -> Tensor:
    """Lay images out in a square, or nearly so, with black gaps between them."""
    count, channels, height, width = images.shape
    across = math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    sheet = images.new_zeros(
        channels, down * (height + _GAP) - _GAP, across * (width + _GAP) - _GAP
    )
    for at, each in enumerate(images):
        top, left = at // across * (height + _GAP), at % across * (width + _GAP)
        sheet[:, top : top + height, left : left + width] = each
    return sheet


class Pixels:
    """An image: bytes of the shape (height, width, channels)."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self._lock, self._png = threading.Lock(), b""

    @staticmethod
    def of(pixels: Tensor) -> Pixels:
        """Read what `Image.compact` has made."""
        return Pixels(pixels.numpy())

    def png(self) -> bytes:
        """Return the image as PNG, which is made once; any thread may ask."""
        with self._lock:
            self._png = self._png or encode(self.data)
            return self._png

    def fields(self) -> dict[str, Any]:
        """Return what a line of media.jsonl says of it, beside its file."""
        height, width, _ = self.data.shape
        return {"kind": "image", "width": width, "height": height}


def encode(data: NDArray[np.uint8]) -> bytes:
    """Return bytes of the shape (height, width, 1, 3 or 4) as a PNG."""
    height, width, channels = data.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _KINDS[channels], 0, 0, 0)
    # each row begins with its filter: none
    rows = np.concatenate([np.zeros((height, 1), np.uint8), data.reshape(height, -1)], axis=1)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in chunks)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def image(pixels: Tensor, span: tuple[float, float] = (0.0, 1.0)) -> Image:
    """Give `run.log` an image, or several that it shows side by side.

    >>> run.log(sample=pl.image(x[0]))

    `pixels`: (height, width), (channels, height, width) or (images, channels, height, width), of 1,
    3 or 4 channels; the first worker's is logged. Bytes are taken as they are, other integers are
    cut to 0 to 255, booleans are black or white. `span`: the floating-point numbers that are black
    and white; what lies outside is cut. Raises `UsageError` for anything else.
    """
    if not isinstance(pixels, Tensor) or pixels.is_complex():
        raise UsageError(
            f"pl.image got a {type(pixels).__qualname__}; give a real tensor, such as one of shape "
            "(3, height, width)"
        )
    channels = 1 if pixels.dim() == 2 else pixels.shape[-3] if pixels.dim() in (3, 4) else 0
    if channels not in _CHANNELS or not pixels.numel():
        raise UsageError(
            f"pl.image got a tensor of shape {tuple(pixels.shape)}; "
            "give (height, width), (channels, height, width) or (images, channels, "
            "height, width) with 1, 3 or 4 channels: x.permute(2, 0, 1) puts channels first"
        )
    if not span[0] < span[1]:
        raise UsageError(
            f"pl.image(..., span={span}): give the numbers that are black and white, the smaller "
            "first"
        )
    return Image(pixels, span)
