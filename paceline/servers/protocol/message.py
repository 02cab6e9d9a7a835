"""Converts dataclasses to messages on the wire and back. The fields define the valid content.

    PullRows(table=0, step=7, free="", ids=<Tensor>)
        --pack-->    {"table": 0, "step": 7, "free": ""}    [ids]
        <--unpack--  tensors travel as they lie in memory, and are not copied

A field is an int, a float, a bool, a str, bytes, an `Index`, a map of plain values, a tensor, a
`Message`, or a tuple of these types. A field with `| None` may be None. `unpack` refuses all other
values, and missing or additional fields, before the message has any effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    NewType,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from torch import Tensor

from paceline.comm.rpc import RpcClient, RpcMessage
from paceline.errors import Mismatch, UsageError

# Number of a unit, an optimizer or a table, from 0 on.
Index = NewType("Index", int)
# Errors that `unpack` may raise.
MALFORMED_ERRORS = (LookupError, TypeError, ValueError, ArithmeticError, UsageError)


class FieldCodec(NamedTuple):
    """How the values of one field type travel."""

    # Converts the received value of the named field. Takes tensors from the iterator.
    load_value: Callable[[str, Any, Iterator[Tensor]], Any]
    # Converts a value to the one that travels, and appends tensors to the list. None: no change.
    dump_value: Callable[[Any, list[Tensor]], Any] | None = None
    # Received values of these types need no `load_value`.
    plain_types: frozenset[type] = frozenset()


class MessageContent(NamedTuple):
    """The content of a message, as `RpcClient` and `RpcServer` send and receive it."""

    body: dict[str, Any]
    tensors: list[Tensor]


class Message:
    """The base of all messages, which are frozen dataclasses. Their fields travel.

    Each subclass looks up the codecs of its fields once, when it is defined.
    """

    # Codecs of fields in the header, by name.
    _header_codecs: ClassVar[dict[str, FieldCodec]] = {}
    # Codecs of tensor fields, which travel after the header.
    _tensor_codecs: ClassVar[dict[str, FieldCodec]] = {}
    # Header fields that are converted before they travel.
    _converted_fields: ClassVar[list[tuple[str, Callable[[Any, list[Tensor]], Any]]]] = []

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hints = {
            name: hint
            for name, hint in get_type_hints(cls).items()
            if get_origin(hint) is not ClassVar
        }
        cls._tensor_codecs = {
            name: _TENSOR_CODECS[hint] for name, hint in hints.items() if hint in _TENSOR_CODECS
        }
        cls._header_codecs = {
            name: _make_codec(hint) for name, hint in hints.items() if hint not in _TENSOR_CODECS
        }
        cls._converted_fields = [
            (name, codec.dump_value)
            for name, codec in cls._header_codecs.items()
            if codec.dump_value is not None
        ]

    def pack(self) -> MessageContent:
        """Convert to the content that travels.

        Tensors are not copied, so they must not change until they have arrived.
        """
        tensors: list[Tensor] = []
        return MessageContent(self.dump_fields(tensors), tensors)

    @classmethod
    def unpack(cls, body: Mapping[str, Any], tensors: Sequence[Tensor]) -> Self:
        """Make a message from what `pack` gave. Raises one of `MALFORMED_ERRORS` for other data."""
        rest = iter(tensors)
        message = cls.load_fields(body, rest)
        if next(rest, None) is not None:
            raise ValueError(f"{cls.__name__} has fewer tensors than the message")
        return message

    def dump_fields(self, tensors: list[Tensor]) -> dict[str, Any]:
        """Make the header, and append the tensors to the list."""
        body = dict(vars(self))
        # The tensors of nested messages come first, then those of this one: `load_fields` takes
        # them in the same order.
        for name in self._tensor_codecs:
            del body[name]
        for name, dump in self._converted_fields:
            body[name] = dump(body[name], tensors)
        for name in self._tensor_codecs:
            value = getattr(self, name)
            tensors += value if isinstance(value, tuple) else (value,)
        return body

    @classmethod
    def load_fields(cls, body: Mapping[str, Any], tensors: Iterator[Tensor]) -> Self:
        """Make a message from what `dump_fields` gave, taking its tensors from the iterator."""
        if not isinstance(body, Mapping):
            raise TypeError(f"{cls.__name__} is no {body!r:.100}")
        message = cls.__new__(cls)
        # Fill the fields directly: a frozen dataclass would need a slow call for each of them.
        fields = vars(message)
        for name, codec in cls._header_codecs.items():
            value = body[name]
            fields[name] = (
                value
                if type(value) in codec.plain_types
                else codec.load_value(name, value, tensors)
            )
        if len(body) > len(fields):
            raise LookupError(
                f"{cls.__name__} has no {', '.join(map(repr, body.keys() - fields.keys())):.100}"
            )
        for name, codec in cls._tensor_codecs.items():
            fields[name] = codec.load_value(name, None, tensors)
        return message


@dataclass(frozen=True)
class Acknowledged(Message):
    """The reply to a request that was carried out, or whose content is kept."""


R = TypeVar("R", bound=Message)


class Request(Message, Generic[R]):
    """The base of all requests of workers, with the class of the reply: `Request[Reply]`.

    `kind` is the name of the request on the wire and in statistics: that of the class, in small
    letters, as `push_gradient` for `PushGradient`.
    """

    kind: ClassVar[str]
    reply_class: ClassVar[type[Message]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        # The reply is the parameter of the base class, which Python keeps in this attribute.
        (cls.reply_class,) = (get_args(base)[0] for base in vars(cls)["__orig_bases__"])

    @property
    def step_served(self) -> int:
        """The step of the request, for the timeline; 0 if it has none."""
        return max(getattr(self, "step", 0), 0)


# By class of the request: a function from the worker and its request to the reply. If that is None,
# the reply has to wait.
Handlers = dict[type[Request[Any]], Callable[[int, Any], Message | None]]


class SentRequest(NamedTuple, Generic[R]):
    """A request on its way to a server."""

    client: RpcClient
    number: int
    request: type[Request[R]]

    def wait_for_reply(self, seconds: float) -> R:
        """Wait for the reply. Raises the errors of `RpcClient.wait_for_answer`."""
        return _unpack_reply(
            self.request, self.client, self.client.wait_for_answer(self.number, seconds)
        )


def send_request(caller: RpcClient, request: Request[R], seconds: float) -> SentRequest[R]:
    """Send a request.

    Its tensors must not change until the reply has come. Raises the errors of `RpcClient.send`.
    """
    body, tensors = request.pack()
    number = caller.send(
        request.kind, step=request.step_served, body=body, tensors=tensors, seconds=seconds
    )
    return SentRequest(caller, number, type(request))


def call_server(caller: RpcClient, request: Request[R], seconds: float) -> R:
    """Send a request and wait for its reply. Raises the errors of `RpcClient.call`."""
    body, tensors = request.pack()
    answer = caller.call(
        request.kind, step=request.step_served, body=body, tensors=tensors, seconds=seconds
    )
    return _unpack_reply(type(request), caller, answer)


def _unpack_reply(request_class: type[Request[R]], caller: RpcClient, answer: RpcMessage) -> R:
    try:
        return request_class.reply_class.unpack(answer.body, answer.tensors)  # type: ignore[return-value]
    except MALFORMED_ERRORS as error:
        raise Mismatch(
            f"{caller.who} answered {request_class.kind} with something else: {error}"
        ) from error


def _make_plain_codec(*types: type) -> FieldCodec:
    """Make the codec of values of these types, which travel as they are."""

    def load(name: str, value: Any, tensors: Iterator[Tensor]) -> Any:
        if type(value) not in types:
            raise TypeError(f"{name} is {value!r:.100}")
        return value

    return FieldCodec(load, plain_types=frozenset(types))


def _load_index(name: str, value: Any, tensors: Iterator[Tensor]) -> Any:
    """Check a number that is counted from 0 on.

    With a negative number, Python would count from the end of a list.
    """
    if type(value) is not int or value < 0:
        raise UsageError(f"there is no {name} {value!r:.100}")
    return value


def _load_tensor(name: str, value: Any, tensors: Iterator[Tensor]) -> Tensor:
    tensor = next(tensors, None)
    if tensor is None:
        raise LookupError(f"there is no tensor {name}")
    return tensor


def _make_optional_codec(inner: FieldCodec) -> FieldCodec:
    def load(name: str, value: Any, tensors: Iterator[Tensor]) -> Any:
        return None if value is None else inner.load_value(name, value, tensors)

    def dump(value: Any, tensors: list[Tensor]) -> Any:
        return (
            None if value is None or inner.dump_value is None else inner.dump_value(value, tensors)
        )

    return FieldCodec(load, inner.dump_value and dump, inner.plain_types | {NoneType})


def _make_tuple_codec(each: FieldCodec, length: int | None = None) -> FieldCodec:
    """Make the codec of a tuple with values of one type. `length`: the valid length, if fixed."""

    def load(name: str, value: Any, tensors: Iterator[Tensor]) -> Any:
        if not isinstance(value, list | tuple) or len(value) != (
            len(value) if length is None else length
        ):
            raise TypeError(f"{name} is {value!r:.100}")
        return tuple([each.load_value(name, entry, tensors) for entry in value])

    def dump(value: Any, tensors: list[Tensor]) -> Any:
        return (
            value
            if each.dump_value is None
            else [each.dump_value(entry, tensors) for entry in value]
        )

    return FieldCodec(load, each.dump_value and dump)


def _make_pair_codec(first: FieldCodec, second: FieldCodec) -> FieldCodec:
    """Make the codec of a tuple of two plain values of different types."""

    def load(name: str, value: Any, tensors: Iterator[Tensor]) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise TypeError(f"{name} is {value!r:.100}")
        return first.load_value(name, value[0], tensors), second.load_value(name, value[1], tensors)

    return FieldCodec(load)


def _make_message_codec(kind: type[Message]) -> FieldCodec:
    return FieldCodec(
        lambda name, value, tensors: kind.load_fields(value, tensors),
        lambda value, tensors: value.dump_fields(tensors),
    )


def _make_codec(hint: Any) -> FieldCodec:
    """Make the codec of a field type. Raises `AssertionError` for a type that can't travel."""
    if hint in _PLAIN_CODECS:
        return _PLAIN_CODECS[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union) and args[1:] == (NoneType,):
        return _make_optional_codec(_make_codec(args[0]))
    if origin is tuple and args[1:] == (...,):
        return _make_tuple_codec(_make_codec(args[0]))
    if origin is tuple and len({*args}) == 1:
        return _make_tuple_codec(_make_codec(args[0]), len(args))
    if origin is tuple and len(args) == 2:
        return _make_pair_codec(*map(_make_codec, args))
    assert isinstance(hint, type) and issubclass(hint, Message), (
        f"a message can't have a field of type {hint}"
    )
    return _make_message_codec(hint)


_PLAIN_CODECS: dict[Any, FieldCodec] = {
    Any: FieldCodec(lambda name, value, tensors: value),
    Index: FieldCodec(_load_index),
    Mapping[str, Any]: _make_plain_codec(dict),
    bool: _make_plain_codec(bool),
    bytes: _make_plain_codec(bytes),
    float: _make_plain_codec(float, int),
    int: _make_plain_codec(int),
    str: _make_plain_codec(str),
}
_TENSOR_CODECS: dict[Any, FieldCodec] = {
    Tensor: FieldCodec(_load_tensor),
    tuple[Tensor, ...]: FieldCodec(lambda name, value, tensors: tuple(tensors)),
}
