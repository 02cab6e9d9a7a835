"""Codings: write one tensor in fewer bytes, and read it back.

They work locally and have no state. The size of a message depends only on the length of the tensor.

    x (1-D float32)  --encode-->  message: parts of fixed dtypes and lengths  --decode-->  about x

    compose(topk(0.01), int8())   values  indices          the message of topk
                                    |        |
                                  int8       |             its values are encoded again
                                  /   \\      |
                             levels scales indices

So the receiver knows how many bytes arrive. Decoding multiplies first and adds afterwards, in two
operations: processors that fuse the two give other bits, and every rank has to get the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor

from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.native.library import has_library

# Elements that are processed together, so that intermediate results stay in the cache.
SPAN = 128 << 10
# Announced once by a strategy that narrows tensors.
NARROWED = "through a codec float64 travels as float32"
# The parts of a message, in the order of the coding's layout.
Message = Sequence[Tensor]


class WirePart(NamedTuple):
    """A part of a message.

    `values` is set if it holds numbers that another coding may encode again.
    """

    dtype: torch.dtype
    numel: int
    values: bool = False

    @property
    def nbytes(self) -> int:
        """Size of the part on the wire, in bytes."""
        return self.numel * self.dtype.itemsize


class Coding(Protocol):
    """A way to write a tensor in fewer bytes.

    All tensors are contiguous, 1-D and float32, on any device.
    """

    def layout(self, numel: int) -> tuple[WirePart, ...]:
        """List the parts of a message for `numel` elements, widest dtype first."""
        ...

    def encode(self, x: Tensor, message: Message, draw: Generator | None = None) -> None:
        """Write `x` into the parts of `message`.

        Random numbers come from `draw` (None: torch's own generator).
        """
        ...

    def decode(self, message: Message, out: Tensor) -> None:
        """Write the decoded message into `out`."""
        ...

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        """Add the decoded message to `out`, or subtract it if `minus` is set."""
        ...


def count_message_bytes(coding: Coding, numel: int) -> int:
    """Count the bytes of a message for `numel` elements."""
    return _layout_end(coding.layout(numel))


def make_message(
    coding: Coding, numel: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, list[Tensor]]:
    """Allocate a message: one tensor of all its bytes, and the parts as views of it."""
    payload = torch.empty(count_message_bytes(coding, numel), dtype=torch.uint8, device=device)
    return payload, split_message(coding, numel, payload)


def split_message(coding: Coding, numel: int, payload: Tensor) -> list[Tensor]:
    """Split the bytes of a message into its parts, as views."""
    views, start = [], 0
    for part in coding.layout(numel):
        start = _align_start(start, part)
        views.append(payload[start : start + part.nbytes].view(part.dtype))
        start += part.nbytes
    return views


def cut_spans(x: Tensor, unit: int = 1) -> Iterator[tuple[int, int]]:
    """Iterate over the (start, stop) of spans to work on, each a multiple of `unit` elements.

    The last span may be shorter. On a GPU there is one span.
    """
    width = max(1, SPAN // unit) * unit if x.device.type == "cpu" else max(1, x.numel())
    for start in range(0, x.numel(), width):
        yield start, min(start + width, x.numel())


def runs_in_c(x: Tensor) -> bool:
    """Whether a tensor is coded in C: it is on the CPU, and this system has the C library."""
    return x.device.type == "cpu" and type(x) is Tensor and has_library()


def make_generator(
    turn: int, number: int, worker: int, device: torch.device | str = "cpu"
) -> Generator:
    """Make the random generator of a coding.

    It is the same in every run for a turn, the number of a bucket or unit, and the worker that
    sends it.
    """
    return Generator(device=device).manual_seed(
        ((turn * 1_000_003 + number) * 65_537 + worker) % (1 << 63)
    )


@dataclass(frozen=True)
class exact:
    """Sends float32 unchanged: four bytes an element.

    >>> pl.where(pl.named("head.*"), pl.exact(), pl.int8())
    """

    __repr__ = format_as_call

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
    """Applies `inner` to the values in the messages of `outer`: `compose(topk(0.01), int8())`.

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.compose(pl.topk(0.01), pl.int8()))))

    For more than two codings, nest it: `compose(compose(topk(0.5), half()), int4())`.
    """

    outer: Coding
    inner: Coding

    __repr__ = format_as_call

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
        encoded_values, between = self._pair_values(x.numel(), message)
        self.outer.encode(x, between, draw)
        for values, inside in encoded_values:
            self.inner.encode(values, inside, draw)

    def decode(self, message: Message, out: Tensor) -> None:
        self.outer.decode(self._decode_inner(message, out.numel()), out)

    def add(self, message: Message, out: Tensor, *, minus: bool = False) -> None:
        self.outer.add(self._decode_inner(message, out.numel()), out, minus=minus)

    def _pair_values(
        self, numel: int, message: Message
    ) -> tuple[list[tuple[Tensor, Message]], list[Tensor]]:
        """Make a message of `outer` that shares all parts with `message`, except for values.

        Values get tensors of their own. The first result pairs each of these with the parts of
        `message` that `inner` encodes it into.
        """
        encoded_values: list[tuple[Tensor, Message]] = []
        between, at = [], 0
        for part in self.outer.layout(numel):
            if part.values:
                width = len(self.inner.layout(part.numel))
                values = torch.empty(part.numel, dtype=part.dtype, device=message[at].device)
                encoded_values.append((values, message[at : at + width]))
                between.append(values)
                at += width
            else:
                between.append(message[at])
                at += 1
        return encoded_values, between

    def _decode_inner(self, message: Message, numel: int) -> list[Tensor]:
        encoded_values, between = self._pair_values(numel, message)
        for values, inside in encoded_values:
            self.inner.decode(inside, values)
        return between


def _align_start(start: int, part: WirePart) -> int:
    # A view as a wider dtype needs an offset that is a multiple of the dtype's size.
    width = part.dtype.itemsize
    return -(-start // width) * width


def _layout_end(layout: Sequence[WirePart]) -> int:
    end = 0
    for part in layout:
        end = _align_start(end, part) + part.nbytes
    return end
