"""The codings in which gradients travel to a server, and the turns from which on they are used.

Workers make this plain data from a codec:

error_feedback(after(100, topk(0.01), before=half()))     turn 0 ... 99    half, with feedback
                                                          turn 100 ...     topk(0.01), with feedback
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from paceline.codec.auto import auto
from paceline.codec.codec import Codec, after, error_feedback, gathered, plain, scattered, where
from paceline.codec.coding import Coding, count_message_bytes, exact, split_message
from paceline.codec.powersgd import powersgd
from paceline.codec.words import codec_words
from paceline.comm.bucket_layout import Bucket
from paceline.errors import Mismatch, UsageError


class CodingPhase(NamedTuple):
    """A coding that is used from turn `begins` on (None: exact).

    `feedback`: a worker adds the loss of the coding to its next gradient.
    """

    begins: int
    coding: Coding | None
    feedback: bool = False


# In the order of their beginnings. Empty if all turns are exact.
Phases = tuple[CodingPhase, ...]


def check_codec(codec: Any) -> None:
    """Raise `UsageError` if any part of a codec can't be used on the way to a server."""
    for leaf in _iterate_leaves(codec):
        _get_leaf_coding(leaf)


def _iterate_leaves(codec: Any) -> Iterator[Any]:
    if isinstance(codec, where):
        yield from _iterate_leaves(codec.then)
        yield from _iterate_leaves(codec.otherwise)
    elif isinstance(codec, after):
        yield from _iterate_leaves(codec.codec)
        yield from _iterate_leaves(codec.before)
    elif isinstance(codec, error_feedback):
        yield from _iterate_leaves(codec.codec)
    else:
        yield codec


def _get_leaf_coding(leaf: Any) -> Coding | None:
    """Get the coding of a leaf of a codec; None for exact. Raises `UsageError` if it has none."""
    if leaf is None or isinstance(leaf, exact | plain):
        return None
    if isinstance(leaf, auto) or leaf == "auto":
        raise UsageError(
            'codec="auto" measures steps of AllReduce; give ParameterServer a codec, such as int8()'
        )
    if isinstance(leaf, powersgd):
        raise UsageError(
            f"{leaf!r} sums thin matrices among workers, and servers take each worker's gradient "
            "by itself: give ParameterServer error_feedback(topk(0.01)), or int8()"
        )
    if isinstance(leaf, gathered | scattered):
        raise UsageError(
            f"{leaf!r} says how workers sum among themselves, and with ParameterServer servers do: "
            f"say {leaf.coding!r}"
        )
    if not hasattr(leaf, "layout"):
        raise UsageError(
            f"a codec is wanted, such as int8() or error_feedback(topk(0.01)), got {leaf!r}"
        )
    # Writing it checks that a server can make it, too.
    pack_coding(leaf)
    coding: Coding = leaf
    return coding


def make_phases(codec: Codec | Coding | None, name: str, shape: Size) -> Phases:
    """Make the phases of a parameter with this name and shape.

    Raises `UsageError` as `check_codec` does.
    """
    codec_phases = _make_codec_phases(codec, name, shape)
    return codec_phases if any(phase.coding is not None for phase in codec_phases) else ()


def _make_codec_phases(codec: Any, name: str, shape: Size) -> Phases:
    if isinstance(codec, where):
        return _make_codec_phases(
            codec.then if codec.predicate.holds(name, shape) else codec.otherwise, name, shape
        )
    if isinstance(codec, error_feedback):
        return tuple(
            phase._replace(feedback=phase.coding is not None)
            for phase in _make_codec_phases(codec.codec, name, shape)
        )
    if isinstance(codec, after):
        # Early phases end at `codec.steps`. Late phases begin there at the earliest. A late phase
        # that ends before is left out: it would begin in the same turn as the next one.
        early = [
            phase
            for phase in _make_codec_phases(codec.before, name, shape)
            if phase.begins < codec.steps
        ]
        late = [
            phase._replace(begins=max(phase.begins, codec.steps))
            for phase in _make_codec_phases(codec.codec, name, shape)
        ]
        return (
            *early,
            *(
                phase
                for phase, following in zip(late, [*late[1:], None], strict=True)
                if _is_ever_used(phase, following)
            ),
        )
    return (CodingPhase(0, _get_leaf_coding(codec)),)


def _is_ever_used(phase: CodingPhase, following: CodingPhase | None) -> bool:
    return following is None or phase.begins < following.begins


def get_phase(phases: Phases, turn: int) -> CodingPhase:
    """Get the phase of this turn."""
    return next((phase for phase in reversed(phases) if phase.begins <= turn), CodingPhase(0, None))


def decode_push(phases: Phases, bucket: Bucket, message: Tensor, used: bytes, turn: int) -> Tensor:
    """Decode a worker's push of a unit.

    Args:
        phases: the codings of the unit.
        bucket: the layout of the unit, and its dtype.
        message: the push, as encoded in the coding of this turn.
        used: a byte for each piece of the unit, whether the worker's backward reached it.
        turn: the worker's turn.

    Returns:
        The gradient, 1-D, in the layout of the unit; zeros in pieces that were not used.

    Raises:
        Mismatch: for a message of another size.
    """
    coding = get_phase(phases, turn).coding
    if coding is None:
        return message
    flat = bucket.flat
    expected_bytes = count_message_bytes(coding, flat.numel())
    if message.dtype != torch.uint8 or message.shape != (expected_bytes,):
        raise Mismatch(
            f"{coding!r} of {flat.numel()} elements is uint8 [{expected_bytes}], and not "
            f"{message.dtype} {list(message.shape)}"
        )
    gradient = torch.empty(flat.numel(), dtype=torch.float32)
    coding.decode(split_message(coding, flat.numel(), message), gradient)
    # Decoding doesn't know about unused pieces, which have to be zero.
    for view, reached in zip(bucket.views_over(gradient), used, strict=True):
        if not reached:
            view.zero_()
    return gradient.to(flat.dtype)


# ---- on the wire: a server knows only the codings of paceline, and makes them by name


@cache
def import_codings() -> Mapping[str, Any]:
    """Import all codings of paceline. Returns their classes by name."""
    locations = {word: location.split(":")[0] for word, location in codec_words().items()}
    classes = {
        word: getattr(importlib.import_module(module), word) for word, module in locations.items()
    }
    return {word: kind for word, kind in classes.items() if hasattr(kind, "layout")}


def pack_coding(coding: Coding) -> list[Any]:
    """Convert a coding to plain data. Raises `UsageError` for one that servers don't know."""
    kind = type(coding)
    if import_codings().get(kind.__name__) is not kind or not dataclasses.is_dataclass(coding):
        raise UsageError(
            f"{coding!r} is no coding of paceline, and a server decodes without your script: "
            f"possible are {', '.join(sorted(import_codings()))}; "
            "for another one use AllReduce"
        )
    values = {field.name: getattr(coding, field.name) for field in dataclasses.fields(coding)}
    return [
        kind.__name__,
        {
            name: pack_coding(value) if hasattr(value, "layout") else value
            for name, value in values.items()
        },
    ]


def unpack_coding(packed: Any) -> Coding:
    """Make a coding from plain data.

    Raises `LookupError`, `TypeError`, `ValueError` or `UsageError` for other data.
    """
    name, values = packed
    coding: Coding = import_codings()[name](
        **{
            key: unpack_coding(value) if isinstance(value, list) else value
            for key, value in values.items()
        }
    )
    # A coding with invalid values fails here, and not at the first gradient.
    coding.layout(1)
    return coding


def pack_phases(phases: Phases) -> list[Any]:
    """Convert phases to plain data, without `feedback`, which only workers need."""
    return [
        [phase.begins, None if phase.coding is None else pack_coding(phase.coding)]
        for phase in phases
    ]


def unpack_phases(packed: Any) -> Phases:
    """Make phases from plain data. Raises the errors of `unpack_coding` for other data."""
    return tuple(
        CodingPhase(int(begins), None if coding is None else unpack_coding(coding))
        for begins, coding in packed
    )
