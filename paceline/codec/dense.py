"""Codings that keep every element, in fewer bits: half, bfloat16, int8, int4, sign.

int8, int4 and sign cut a tensor into blocks of `block` elements. The last block may be shorter.
Each block has a float32 scale:

    coding   value              level         scale                     packing
    int8     x = level * scale  -127 .. 127   largest |x| / 127         one level a byte
    int4     x = level * scale  -7 .. 7       largest |x| / 7           two levels a byte
    sign     x = level * scale  -1 or 1       mean |x|                  eight signs a byte

On the CPU, C writes and reads the blocks (native/codecs.h), with the bits of torch on one thread.
On other devices, and on systems without the C library, torch does it.

sign is the 1-bit SGD of Seide et al. 2014. A value that isn't finite makes its whole block not
finite, so it is never lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Generator, Tensor

from paceline.codec.coding import Message, WirePart, cut_spans, runs_in_c
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice, format_as_call
from paceline.native.functions import load_functions

Rounding = Literal["nearest", "stochastic"]
# Smaller scales are raised to this one before division; 1 / TINY is still finite in float32.
TINY = 1e-30
# Eight bytes of 0 or 1, read as one integer and multiplied by this, have their bits side by side in
# the highest byte of the product.
BITS = 0x0102_0408_1020_4080


class _NarrowFloat:
    """A coding that stores each element in a smaller floating-point type."""

    kind: torch.dtype

    def layout(self, numel: int) -> tuple[WirePart, ...]:
        return (WirePart(self.kind, numel),)

    def decode(self, message: Message, out: Tensor) -> None:
        out.copy_(message[0])

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        (out.sub_ if minus else out.add_)(message[0])


@dataclass(frozen=True)
class half(_NarrowFloat):
    """float16: two bytes an element, 11 significant bits.

    >>> pl.start(sync=pl.AllReduce(codec=pl.half()))

    Finite values beyond +-65,504 become +-65,504.
    """

    __repr__ = format_as_call
    kind = torch.float16

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        limit = torch.finfo(torch.float16).max
        for start, stop in cut_spans(x):
            target = message[0][start:stop].copy_(x[start:stop])
            # One sum tells whether all elements are finite. Only if not, the slow way is taken:
            # values that are too large are clamped, true infinities and nan stay.
            if not bool(torch.isfinite(target.sum(dtype=torch.float32))):
                piece = x[start:stop]
                target.copy_(torch.where(piece.isinf(), piece, piece.clamp(-limit, limit)))


@dataclass(frozen=True)
class bfloat16(_NarrowFloat):
    """bfloat16: two bytes an element, 8 significant bits, and the range of float32.

    >>> pl.start(sync=pl.AllReduce(codec=pl.bfloat16()))
    """

    __repr__ = format_as_call
    kind = torch.bfloat16

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        message[0].copy_(x)


class _BlockCoding:
    """A coding in blocks. For torch, subclasses write and read rows, and each row is a block."""

    number: int  # in native/codecs.h
    block: int
    packed: int = 1  # levels in a byte

    def layout(self, numel: int) -> tuple[WirePart, ...]:
        kind = torch.int8 if self.packed == 1 else torch.uint8
        return WirePart(torch.float32, -(-numel // self.block)), WirePart(
            kind, -(-numel // self.packed)
        )

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        if not runs_in_c(x):
            for rows, scales, levels in self._iterate_rows(x, message):
                self._write_rows(rows, scales, levels, draw)
            return
        scales_at, levels_at = (part.data_ptr() for part in message)
        # In spans, so that the noise stays in the cache.
        for start, stop in cut_spans(x, self.block):
            noise = self._draw_noise(stop - start, draw)
            load_functions().encode(
                self.number,
                x.data_ptr() + 4 * start,
                stop - start,
                self.block,
                None if noise is None else noise.data_ptr(),
                scales_at + 4 * (start // self.block),
                levels_at + start // self.packed,
            )

    def decode(self, message: Message, out: Tensor) -> None:
        if runs_in_c(out):
            parts = [part.data_ptr() for part in message]
            load_functions().decode(self.number, out.data_ptr(), out.numel(), self.block, *parts)
            return
        for rows, scales, levels in self._iterate_rows(out, message):
            self._read_rows(scales, levels, rows)

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        if runs_in_c(out):
            parts = [part.data_ptr() for part in message]
            load_functions().decode_add(
                self.number, out.data_ptr(), out.numel(), self.block, *parts, -1.0 if minus else 1.0
            )
            return
        buffer: Tensor | None = None
        # the first rows are the largest, so one buffer serves all
        for rows, scales, levels in self._iterate_rows(out, message):
            if buffer is None or buffer.numel() < rows.numel():
                buffer = torch.empty_like(rows).view(-1)
            decoded = buffer[: rows.numel()].view(rows.shape)
            self._read_rows(scales, levels, decoded)
            (rows.sub_ if minus else rows.add_)(decoded)

    def _draw_noise(self, numel: int, draw: Generator | None) -> Tensor | None:
        """Draw the noise of stochastic rounding. None if levels are rounded to the nearest."""
        return None

    def _iterate_rows(self, x: Tensor, message: Message) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Iterate over rows of full blocks, with their scales and levels.

        The shorter block at the end, if any, follows as a row of its own.
        """
        scales, levels = message
        full_numel = x.numel() // self.block * self.block
        for start, stop in cut_spans(x[:full_numel], self.block):
            first_block, end_block = start // self.block, stop // self.block
            level_rows = levels[start // self.packed : stop // self.packed].view(
                end_block - first_block, -1
            )
            yield x[start:stop].view(-1, self.block), scales[first_block:end_block], level_rows
        if full_numel < x.numel():
            yield (
                x[full_numel:].view(1, -1),
                scales[-1:],
                levels[full_numel // self.packed :].view(1, -1),
            )

    def _write_rows(
        self, rows: Tensor, scales: Tensor, levels: Tensor, draw: Generator | None
    ) -> None:
        raise NotImplementedError

    def _read_rows(self, scales: Tensor, levels: Tensor, rows: Tensor) -> None:
        raise NotImplementedError


class _LevelCoding(_BlockCoding):
    """Codes values as integer levels from -`top` to `top`."""

    rounding: Rounding
    top: int

    def __post_init__(self) -> None:
        _check_block(self, self.block, max(2, self.packed))
        if wrong := describe_unknown_choice("rounding", self.rounding, Rounding):
            raise UsageError(wrong)

    def _draw_noise(self, numel: int, draw: Generator | None) -> Tensor | None:
        if self.rounding == "nearest":
            return None
        return torch.rand(numel, generator=draw, dtype=torch.float32, device="cpu")

    def _compute_levels(self, rows: Tensor, scales: Tensor, draw: Generator | None) -> Tensor:
        """Compute the levels, as float32, and write the scales into `scales`."""
        # aminmax is one pass over the rows without a copy, unlike the largest of rows.abs()
        low, high = torch.aminmax(rows, dim=1)
        scale = torch.maximum(high, low.neg_()).mul_(1 / self.top)
        scales.copy_(scale)
        scaled = rows * scale.clamp_min_(TINY).reciprocal_().unsqueeze(1)
        if self.rounding == "nearest":
            return scaled.round_()
        # The chance of rounding up is the fraction of the value, so the mean is the value.
        noise = torch.rand(rows.shape, generator=draw, dtype=rows.dtype, device=rows.device)
        return scaled.add_(noise).floor_().clamp_(-self.top, self.top)


@dataclass(frozen=True)
class int8(_LevelCoding):
    """Eight bits an element, and a scale for each `block` of elements.

    >>> pl.start(sync=pl.AllReduce(codec=pl.int8(rounding="stochastic")))

    `rounding="stochastic"` rounds up or down at random, so that the expected value is the value
    itself (QSGD, Alistarh et al. 2017).
    """

    block: int = 1024
    rounding: Rounding = "nearest"

    __repr__ = format_as_call
    number = 0
    top = 127

    def _write_rows(
        self, rows: Tensor, scales: Tensor, levels: Tensor, draw: Generator | None
    ) -> None:
        levels.copy_(self._compute_levels(rows, scales, draw))

    def _read_rows(self, scales: Tensor, levels: Tensor, rows: Tensor) -> None:
        rows.copy_(levels).mul_(scales.unsqueeze(1))


@dataclass(frozen=True)
class int4(_LevelCoding):
    """Four bits an element, and a scale for each `block` of elements.

    >>> pl.start(sync=pl.LocalSGD(every=32, codec=pl.error_feedback(pl.int4())))

    `rounding` is the same as in `int8`.
    """

    block: int = 256
    rounding: Rounding = "nearest"

    __repr__ = format_as_call
    number = 1
    top = 7
    packed = 2

    def _write_rows(
        self, rows: Tensor, scales: Tensor, levels: Tensor, draw: Generator | None
    ) -> None:
        level = self._compute_levels(rows, scales, draw).nan_to_num_().add_(8).to(torch.uint8)
        # The first half of a block goes to the low bits of its bytes, the second half to the high
        # bits. So both halves are contiguous. Levels are stored as 1 to 15.
        width = levels.shape[1]
        levels.copy_(level[:, :width])
        high = level[:, width:]
        levels[:, : high.shape[1]].bitwise_or_(high.bitwise_left_shift(4))

    def _read_rows(self, scales: Tensor, levels: Tensor, rows: Tensor) -> None:
        width = levels.shape[1]
        rows[:, :width].copy_(levels.bitwise_and(15))
        rows[:, width:].copy_(levels[:, : rows.shape[1] - width].bitwise_right_shift(4))
        rows.sub_(8).mul_(scales.unsqueeze(1))


@dataclass(frozen=True)
class sign(_BlockCoding):
    """One bit an element, its sign, and the mean absolute value of each `block` of elements.

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.sign())))

    This is 1-bit SGD (Seide et al. 2014). With SGD it needs `error_feedback` around it. With Adam
    it works as well without. In smaller blocks, small elements survive better among large ones.
    `gathered(sign())` gives the mean of all signs. The default, scattered, takes the sign of that
    mean again.
    """

    block: int = 64

    __repr__ = format_as_call
    number = 2
    packed = 8

    def __post_init__(self) -> None:
        _check_block(self, self.block, 8)

    def _write_rows(
        self, rows: Tensor, scales: Tensor, levels: Tensor, draw: Generator | None
    ) -> None:
        torch.mean(rows.abs(), dim=1, out=scales)
        negative = rows < 0
        padding = -rows.shape[1] % 8
        if padding:
            negative = torch.nn.functional.pad(negative, (0, padding))
        # Eight signs, one a byte, are read as one integer and packed into one byte (see BITS).
        groups = negative.view(torch.uint8).view(torch.int64)
        levels.copy_(groups.mul(BITS).bitwise_right_shift_(56))

    def _read_rows(self, scales: Tensor, levels: Tensor, rows: Tensor) -> None:
        signs = torch.index_select(
            _sign_table(str(levels.device)), 0, levels.reshape(-1).int()
        ).view(levels.shape[0], -1)
        torch.mul(signs[:, : rows.shape[1]], scales.unsqueeze(1), out=rows)


@cache
def _sign_table(device: str) -> Tensor:
    """Table of the eight signs of each byte, lowest bit first: -1 for a bit that is set."""
    bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    return (1 - 2 * bits).to(torch.float32).to(device)


def _check_block(coding: object, block: int, multiple: int) -> None:
    if not isinstance(block, int) or block < multiple or block % multiple:
        raise UsageError(f"{coding!r}: block is {block!r}; choose a multiple of {multiple} above 0")
