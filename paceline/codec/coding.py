"""Codings: one tensor, smaller, and back: local, without state, and of a size that is known before
there is a value.

    x (1-D float32)  --encode-->  message: parts of fixed dtypes and lengths  --decode-->  about x

    compose(topk(0.01), int8())   values  indices          what topk gives
                                    |        |
                                  int8       |             its values are made smaller again
                                  /   \\      |
                             levels scales indices

Messages of a coding have one layout for one length, so the receiver knows how much comes. Decoding
multiplies and then adds, never both at once: processors that fuse the two give other bits, and
every rank has to get the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor

from paceline.errors import UsageError
from paceline.formatting import spell

# elements that are worked on together, so that what lies between stays in the cache
SPAN = 128 << 10
NARROWED = "through a codec float64 travels as float32"  # announced once by a strategy
Message = Sequence[Tensor]


class WirePart(NamedTuple):
    """A part of a message; `values` says that it holds numbers that another coding may make
    smaller.
    """

    dtype: torch.dtype
    numel: int
    values: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the part on the wire."""
        return self.numel * self.dtype.itemsize


class Coding(Protocol):
    """A way to write a tensor in fewer bytes.

    All tensors are contiguous, 1-D and float32, on any device.
    """

    def layout(self, numel: int) -> tuple[WirePart, ...]:
        """Return the parts of the message of a tensor of `numel` elements, widest dtype first."""
        ...

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        """Write `x` into the parts of `message`.

        Random numbers come from `draw` (None: torch's own generator).
        """
        ...

    def decode(self, message: Message, out: Tensor) -> None:
        """Write what the message says into `out`."""
        ...

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        """Add what `decode` would write, or subtract it."""
        ...


def nbytes(coding: Coding, numel: int) -> int:
    """Return the number of bytes of a message."""
    return _end(coding.layout(numel))


def room(
    coding: Coding, numel: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, list[Tensor]]:
    """Make an empty message: all its bytes in one tensor, and its parts in there."""
    whole = torch.empty(nbytes(coding, numel), dtype=torch.uint8, device=device)
    return whole, parts(coding, numel, whole)


def parts(coding: Coding, numel: int, whole: Tensor) -> list[Tensor]:
    """Return the parts of a message whose bytes are `whole`."""
    views, start = [], 0
    for part in coding.layout(numel):
        start = _aligned(start, part)
        views.append(whole[start : start + part.nbytes].view(part.dtype))
        start += part.nbytes
    return views


def spans(x: Tensor, unit: int = 1) -> Iterator[tuple[int, int]]:
    """Cut a tensor into (start, stop) of stretches to work on, multiples of `unit`; on a GPU all
    at once.
    """
    width = max(1, SPAN // unit) * unit if x.device.type == "cpu" else max(1, x.numel())
    for start in range(0, x.numel(), width):
        yield start, min(start + width, x.numel())


def seeded(turn: int, number: int, worker: int, device: torch.device | str = "cpu") -> Generator:
    """Make what a coding draws from: the same in each run for a turn, the number of a bucket or
    unit, and the worker that sends it.
    """
    return Generator(device=device).manual_seed(
        ((turn * 1_000_003 + number) * 65_537 + worker) % (1 << 63)
    )


@dataclass(frozen=True)
class exact:
    """Sends float32 as it is: four bytes an element.

    >>> pl.where(pl.named("head.*"), pl.exact(), pl.int8())
    """

    __repr__ = spell

    def layout(self, numel: int) -> tuple[WirePart, ...]:
        return (WirePart(torch.float32, numel, values=True),)

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        message[0].copy_(x)

    def decode(self, message: Message, out: Tensor) -> None:
        out.copy_(message[0])

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        (out.sub_ if minus else out.add_)(message[0])


@dataclass(frozen=True)
class compose:
    """Applies `inner` to the values that `outer` leaves: `compose(topk(0.01), int8())`.

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.compose(pl.topk(0.01), pl.int8()))))

    More than two are nested: `compose(compose(topk(0.5), half()), int4())`.
    """

    outer: Coding
    inner: Coding

    __repr__ = spell

    def __post_init__(self) -> None:
        for coding in (self.outer, self.inner):
            if not hasattr(coding, "layout"):
                raise UsageError(
                    f"compose joins codings, such as topk(0.01) and int8(), got {coding!r}"
                )
        if not any(part.values for part in self.outer.layout(1)):
            raise UsageError(
                f"{self.outer!r} leaves no values that {self.inner!r} "
                "could make smaller; put it last"
            )

    def layout(self, numel: int) -> tuple[WirePart, ...]:
        wire_parts: list[WirePart] = []
        for part in self.outer.layout(numel):
            wire_parts += self.inner.layout(part.numel) if part.values else [part]
        return tuple(wire_parts)

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        given, between = self._between(x.numel(), message)
        self.outer.encode(x, between, draw)
        for values, inside in given:
            self.inner.encode(values, inside, draw)

    def decode(self, message: Message, out: Tensor) -> None:
        self.outer.decode(self._opened(message, out.numel()), out)

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        self.outer.add(self._opened(message, out.numel()), out, minus=minus)

    def _between(
        self, numel: int, message: Message
    ) -> tuple[list[tuple[Tensor, Message]], list[Tensor]]:
        """Return (values, the parts of `message` that hold them in the end) of each part with
        values; and a message of `outer`.
        """
        given: list[tuple[Tensor, Message]] = []
        between, at = [], 0
        for part in self.outer.layout(numel):
            if part.values:
                width = len(self.inner.layout(part.numel))
                values = torch.empty(part.numel, dtype=part.dtype, device=message[at].device)
                given.append((values, message[at : at + width]))
                between.append(values)
                at += width
            else:
                between.append(message[at])
                at += 1
        return given, between

    def _opened(self, message: Message, numel: int) -> list[Tensor]:
        given, between = self._between(numel, message)
        for values, inside in given:
            self.inner.decode(inside, values)
        return between


def _aligned(start: int, part: WirePart) -> int:
    width = part.dtype.itemsize
    return -(-start // width) * width


def _end(layout: Sequence[WirePart]) -> int:
    end = 0
    for part in layout:
        end = _aligned(end, part) + part.nbytes
    return end
