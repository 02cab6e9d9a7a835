"""Codings that keep every element and spend fewer bits on it: half, bfloat16, int8, int4, sign.

int8, int4 and sign cut a tensor into blocks of `block` elements, the last one may be shorter, with
a float32 scale each:

    int8   x = level x scale,  level -127..127       scale = largest of the block / 127
    int4   x = level x scale,  level -7..7           scale = largest of the block / 7,  two levels a
                                                     byte
    sign   x = +-scale                               scale = mean of |x| in the block,  eight signs
                                                     a byte  (Seide et al. 2014)

A value that is not finite makes its whole block not finite: it is never lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Generator, Tensor

from paceline.codec.coding import Message, WirePart, cut_spans
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice, format_as_call

Rounding = Literal["nearest", "stochastic"]
TINY = 1e-30  # scales below are as good as zero; 1 / TINY is still a number
BITS = 0x0102_0408_1020_4080  # times eight bytes of 0 or 1, gives their bits in the highest byte


class _NarrowFloat:
    """A coding as another floating-point type."""

    kind: torch.dtype

    def layout(self, numel: int) -> tuple[WirePart, ...]:
        return (WirePart(self.kind, numel),)

    def decode(self, message: Message, out: Tensor) -> None:
        out.copy_(message[0])

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        (out.sub_ if minus else out.add_)(message[0])


@dataclass(frozen=True)
class half(_NarrowFloat):
    """float16: two bytes an element, 11 significant bits; values larger than 65,504 become that.

    >>> pl.start(sync=pl.AllReduce(codec=pl.half()))
    """

    __repr__ = format_as_call
    kind = torch.float16

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        limit = torch.finfo(torch.float16).max
        for start, stop in cut_spans(x):
            into = message[0][start:stop].copy_(x[start:stop])
            # rare: too large, or not finite to begin with
            if not bool(torch.isfinite(into.sum(dtype=torch.float32))):
                piece = x[start:stop]
                into.copy_(torch.where(piece.isinf(), piece, piece.clamp(-limit, limit)))


@dataclass(frozen=True)
class bfloat16(_NarrowFloat):
    """bfloat16: two bytes an element, 8 significant bits, the range of float32.

    >>> pl.start(sync=pl.AllReduce(codec=pl.bfloat16()))
    """

    __repr__ = format_as_call
    kind = torch.bfloat16

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        message[0].copy_(x)


class _BlockCoding:
    """The common part of codings in blocks: `_write` and `_read` work on some rows, one block
    each.
    """

    block: int
    packed: int = 1  # levels in a byte

    def layout(self, numel: int) -> tuple[WirePart, ...]:
        kind = torch.int8 if self.packed == 1 else torch.uint8
        return WirePart(torch.float32, -(-numel // self.block)), WirePart(
            kind, -(-numel // self.packed)
        )

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        for rows, scales, levels in self._iterate_rows(x, message):
            self._write_rows(rows, scales, levels, draw)

    def decode(self, message: Message, out: Tensor) -> None:
        for rows, scales, levels in self._iterate_rows(out, message):
            self._read_rows(scales, levels, rows)

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        spare: Tensor | None = None
        for rows, scales, levels in self._iterate_rows(out, message):
            if spare is None or spare.numel() < rows.numel():
                spare = torch.empty_like(rows).view(-1)
            piece = spare[: rows.numel()].view(rows.shape)
            self._read_rows(scales, levels, piece)
            (rows.sub_ if minus else rows.add_)(piece)

    def _iterate_rows(self, x: Tensor, message: Message) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Iterate over whole blocks as rows, with their scales and levels; then the shorter
        block, as a row of its own.
        """
        scales, levels = message
        whole = x.numel() // self.block * self.block
        for start, stop in cut_spans(x[:whole], self.block):
            first, last = start // self.block, stop // self.block
            bytes_ = levels[start // self.packed : stop // self.packed].view(last - first, -1)
            yield x[start:stop].view(-1, self.block), scales[first:last], bytes_
        if whole < x.numel():
            yield x[whole:].view(1, -1), scales[-1:], levels[whole // self.packed :].view(1, -1)

    def _write_rows(
        self, rows: Tensor, scales: Tensor, levels: Tensor, draw: Generator | None
    ) -> None:
        raise NotImplementedError

    def _read_rows(self, scales: Tensor, levels: Tensor, rows: Tensor) -> None:
        raise NotImplementedError


class _LevelCoding(_BlockCoding):
    """Codes values as whole levels up to `top`, as many above zero as below."""

    rounding: Rounding
    top: int

    def __post_init__(self) -> None:
        _check_block(self, self.block, max(2, self.packed))
        if wrong := describe_unknown_choice("rounding", self.rounding, Rounding):
            raise UsageError(wrong)

    def _compute_levels(self, rows: Tensor, scales: Tensor, draw: Generator | None) -> Tensor:
        """Compute the levels, as float32; `scales` is written."""
        low, high = torch.aminmax(rows, dim=1)
        scale = torch.maximum(high, low.neg_()).mul_(1 / self.top)
        scales.copy_(scale)
        level = rows * scale.clamp_min_(TINY).reciprocal_().unsqueeze(1)
        if self.rounding == "nearest":
            return level.round_()
        chance = torch.rand(rows.shape, generator=draw, dtype=rows.dtype, device=rows.device)
        return level.add_(chance).floor_().clamp_(-self.top, self.top)


@dataclass(frozen=True)
class int8(_LevelCoding):
    """Eight bits an element and a scale for each `block` of them.

    >>> pl.start(sync=pl.AllReduce(codec=pl.int8(rounding="stochastic")))

    `rounding="stochastic"` rounds up or down by chance, so that the expectation is the value itself
    (QSGD, Alistarh et al. 2017).
    """

    block: int = 1024
    rounding: Rounding = "nearest"

    __repr__ = format_as_call
    top = 127

    def _write_rows(
        self, rows: Tensor, scales: Tensor, levels: Tensor, draw: Generator | None
    ) -> None:
        levels.copy_(self._compute_levels(rows, scales, draw))

    def _read_rows(self, scales: Tensor, levels: Tensor, rows: Tensor) -> None:
        rows.copy_(levels).mul_(scales.unsqueeze(1))


@dataclass(frozen=True)
class int4(_LevelCoding):
    """Four bits an element and a scale for each `block` of them; `rounding` as in `int8`.

    >>> pl.start(sync=pl.LocalSGD(every=32, codec=pl.error_feedback(pl.int4())))
    """

    block: int = 256
    rounding: Rounding = "nearest"

    __repr__ = format_as_call
    top = 7
    packed = 2

    def _write_rows(
        self, rows: Tensor, scales: Tensor, levels: Tensor, draw: Generator | None
    ) -> None:
        level = self._compute_levels(rows, scales, draw).nan_to_num_().add_(8).to(torch.uint8)
        # the first half of a block is in the low bits, the second in the high ones
        cut = levels.shape[1]
        levels.copy_(level[:, :cut])
        high = level[:, cut:]
        levels[:, : high.shape[1]].bitwise_or_(high.bitwise_left_shift(4))

    def _read_rows(self, scales: Tensor, levels: Tensor, rows: Tensor) -> None:
        cut = levels.shape[1]
        rows[:, :cut].copy_(levels.bitwise_and(15))
        rows[:, cut:].copy_(levels[:, : rows.shape[1] - cut].bitwise_right_shift(4))
        rows.sub_(8).mul_(scales.unsqueeze(1))


@dataclass(frozen=True)
class sign(_BlockCoding):
    """One bit an element, its sign, and the mean size of each `block` of elements.

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.sign())))

    It is 1-bit SGD (Seide et al. 2014). With SGD it needs `error_feedback` around it, with Adam it
    does as well without. The smaller the blocks, the better small elements survive among large
    ones. `gathered(sign())` is the mean of all signs; the default, scattered, is the sign of that
    again.
    """

    block: int = 64

    __repr__ = format_as_call
    packed = 8

    def __post_init__(self) -> None:
        _check_block(self, self.block, 8)

    def _write_rows(
        self, rows: Tensor, scales: Tensor, levels: Tensor, draw: Generator | None
    ) -> None:
        torch.mean(rows.abs(), dim=1, out=scales)
        negative = rows < 0
        missing = -rows.shape[1] % 8
        if missing:
            negative = torch.nn.functional.pad(negative, (0, missing))
        eights = negative.view(torch.uint8).view(torch.int64)
        levels.copy_(eights.mul(BITS).bitwise_right_shift_(56))

    def _read_rows(self, scales: Tensor, levels: Tensor, rows: Tensor) -> None:
        signs = torch.index_select(
            _sign_table(str(levels.device)), 0, levels.reshape(-1).int()
        ).view(levels.shape[0], -1)
        torch.mul(signs[:, : rows.shape[1]], scales.unsqueeze(1), out=rows)


@cache
def _sign_table(device: str) -> Tensor:
    """Return the eight signs of each byte, lowest bit first: -1 where the bit is set."""
    bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    return (1 - 2 * bits).to(torch.float32).to(device)


def _check_block(coding: object, block: int, multiple: int) -> None:
    if not isinstance(block, int) or block < multiple or block % multiple:
        raise UsageError(
            f"{coding!r}: block is {block!r}, and has to be a multiple of {multiple} above 0"
        )
