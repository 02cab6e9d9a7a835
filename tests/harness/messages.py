"""Messages between workers and servers, drawn by their types; and what can't be one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.rpc import FRAME, RpcMessage
from paceline.servers.protocol.message import MALFORMED_ERRORS, Index, Message, Request

NUMBERS = st.integers(0, (1 << 63) - 1)
TENSORS = st.builds(
    lambda kind, shape: torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(kind),
    st.sampled_from([torch.int64, torch.float32, torch.float64, torch.uint8]),
    st.lists(st.integers(0, 3), max_size=2),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    Any: st.none() | NUMBERS | TEXTS | st.lists(NUMBERS, max_size=2),
    Index: NUMBERS,
    Mapping[str, Any]: st.dictionaries(TEXTS, NUMBERS | st.booleans() | TEXTS, max_size=3),
    Tensor: TENSORS,
    bool: st.booleans(),
    bytes: st.binary(max_size=9),
    float: st.floats(allow_nan=False),
    int: st.integers(-(1 << 63), (1 << 63) - 1),
    str: TEXTS,
}
FOREIGN: dict[Any, Any] = {
    Any: None,
    Mapping[str, Any]: [],
    bool: 1,
    float: "1.0",
    int: 1.0,
    str: b"x",
    bytes: "x",
    Index: -1,
}


def messages(module: ModuleType) -> list[Any]:
    """The classes of messages that are defined in a module."""
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Message)
    ]
    return [
        kind
        for kind in kinds
        if kind.__module__ == module.__name__ and kind not in (Message, Request)
    ]


def hints(kind: type[Message]) -> dict[str, Any]:
    """The type of each field."""
    known = get_type_hints(kind)
    return {field.name: known[field.name] for field in fields(kind)}  # type: ignore[arg-type]


def drawn(kind: type[Message]) -> st.SearchStrategy[Any]:
    """Any message of this class."""
    return st.builds(kind, **{name: _values(hint) for name, hint in hints(kind).items()})


def _values(hint: Any) -> st.SearchStrategy[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if origin in (UnionType, Union):
        return st.none() | _values(args[0])
    if origin is tuple and args[1:] == (...,):
        return st.lists(_values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_values, args))
    return drawn(hint)


def foreign(hint: Any) -> list[Any]:
    """Values that are none of this type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in FOREIGN:
        return (
            []
            if hint is Any
            else [FOREIGN[hint], None, {"x": 1} if hint != Mapping[str, Any] else 5]
        )
    if origin in (UnionType, Union):
        return [value for value in foreign(args[0]) if value is not None]
    if origin is tuple and args[1:] == (...,):
        return [None, 5, "x", *([value] for value in foreign(args[0]))]
    if origin is tuple:
        return [None, [], [1], [1] * 9]
    return [None, 5, [], {}, {"x": 1}]


def received(message: Message) -> Message:
    """The same message, as it arrives."""
    body, tensors = message.pack()
    frames = [
        memoryview(frame)
        for frame in RpcMessage("x", 1, body=body, tensors=tuple(tensors)).to_frames(FRAME)
    ]
    frames = [
        memoryview(bytes(frame.cast("B"))) if frame.nbytes else memoryview(b"") for frame in frames
    ]
    came = RpcMessage.from_frames(frames, frame=FRAME)
    return type(message).unpack(came.body, came.tensors)


def same(one: Any, other: Any) -> bool:
    """Whether two messages say the same."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Message):
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in hints(type(one))
        )
    return type(one) is type(other) and bool(one == other)


def check(message: Message) -> None:
    """A message arrives as it was sent, and nothing else is taken for it: no field or tensor too
    few, too many, or of another type.
    """
    assert same(received(message), message)
    kind, (body, tensors) = type(message), message.pack()
    wrong: list[tuple[Any, list[Tensor]]] = [
        (None, tensors),
        ([], tensors),
        ({**body, "x": 1}, tensors),
    ]
    wrong += [
        ({other: value for other, value in body.items() if other != name}, tensors) for name in body
    ]
    wrong += [
        ({**body, name: value}, tensors)
        for name, hint in hints(kind).items()
        if name in body
        for value in foreign(hint)
    ]
    if tuple[Tensor, ...] not in hints(kind).values():
        wrong += [(body, [*tensors, torch.ones(1)])]
        wrong += [(body, tensors[:-1])] if tensors else []
    for spoilt, rest in wrong:
        with pytest.raises(MALFORMED_ERRORS):
            kind.unpack(spoilt, rest)
