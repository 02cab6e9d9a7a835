"""Images that are logged: pixels on their device, which become a PNG where they are written."""

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

# Grey, colour, and colour with opacity.
_CHANNELS: Final = (1, 3, 4)
# Colour type of PNG by the number of channels.
_COLOUR_TYPES: Final = {1: 0, 3: 2, 4: 6}
_GAP_PIXELS: Final = 2  # pixels between images side by side


@dataclass(frozen=True)
class Image:
    """Pixels that are logged as an image.

    `span` is the pair of numbers that mean black and white, if the pixels aren't integers.
    """

    pixels: Tensor
    span: tuple[float, float] = (0.0, 1.0)

    def to_compact_tensor(self) -> Tensor:
        """Return pixels as bytes (height, width, channels), without waiting for their device."""
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
        # One channel: (height, width) becomes (1, height, width). Several images become one sheet.
        pixels = pixels[None] if pixels.dim() == 2 else pixels
        pixels = _tile_images(pixels) if pixels.dim() == 4 else pixels
        return pixels.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)


def _tile_images(images: Tensor) -> Tensor:
    """Arrange images in a square, or nearly so, with black gaps between them."""
    count, channels, height, width = images.shape
    across = math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    sheet = images.new_zeros(
        channels,
        down * (height + _GAP_PIXELS) - _GAP_PIXELS,
        across * (width + _GAP_PIXELS) - _GAP_PIXELS,
    )
    for index, pixels in enumerate(images):
        top, left = index // across * (height + _GAP_PIXELS), index % across * (width + _GAP_PIXELS)
        sheet[:, top : top + height, left : left + width] = pixels
    return sheet


class Pixels:
    """An image as bytes of the shape (height, width, channels)."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self._lock, self._png = threading.Lock(), b""

    @staticmethod
    def from_tensor(pixels: Tensor) -> Pixels:
        """Read the tensor that `Image.to_compact_tensor` has made."""
        return Pixels(pixels.numpy())

    def to_png(self) -> bytes:
        """Return the image as a PNG, which is encoded once. Any thread may call this."""
        # Each tracker writes the image on a thread of its own.
        with self._lock:
            self._png = self._png or encode_png(self.data)
            return self._png

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of a line in media.jsonl, without the file."""
        height, width, _ = self.data.shape
        return {"kind": "image", "width": width, "height": height}


def encode_png(data: NDArray[np.uint8]) -> bytes:
    """Encode bytes of the shape (height, width, channels) as a PNG, with 1, 3 or 4 channels.

    Source: W3C, Portable Network Graphics (PNG) Specification.
    """
    height, width, channels = data.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    # Each row begins with a byte for its filter. 0 means none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), data.reshape(height, -1)], axis=1)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(kind, body) for kind, body in chunks)


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG: length, kind, body and checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def image(pixels: Tensor, span: tuple[float, float] = (0.0, 1.0)) -> Image:
    """Log an image, or several that are shown side by side, with `run.log`.

    >>> run.log(sample=pl.image(x[0]))

    Args:
        pixels: Tensor of shape (height, width), (channels, height, width) or (images, channels,
            height, width), with 1, 3 or 4 channels. The first worker's is logged. Bytes are taken
            as they are, other integers are clamped to 0 to 255, and booleans are black or white.
        span: Floating-point numbers that are black and white. Pixels outside are clamped. Default:
            (0.0, 1.0).

    Returns:
        A value for `run.log`.

    Raises:
        UsageError: The tensor has another shape, is complex or empty, or `span` is not increasing.
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
            f"pl.image(..., span={span}): give the numbers that are "
            "black and white, the smaller first"
        )
    return Image(pixels, span)
