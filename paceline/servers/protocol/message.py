"""Conversion of a dataclass to a message on the wire and back; its fields define valid content.

    PullRows(table=0, step=7, free="", ids=<Tensor>)
        --pack-->    {"table": 0, "step": 7, "free": ""}    [ids]
        <--unpack--  tensors travel as they lie in memory, and are not copied

A field is an int, a float, a bool, a str, bytes, an `Index`, a map of plain values, a tensor, a
`Message`, or a tuple of those; with `| None` it may be absent. `unpack` refuses everything else,
and missing or additional fields, before the message has any effect.
"""

from __future__ import annotations

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

Index = NewType("Index", int)  # the number of a unit, an optimizer or a table, from 0 on
# what `unpack` raises
MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, UsageError)


class FieldCodec(NamedTuple):
    """How the values of one type travel."""

    # from the field's name and what has come, to the value
    load: Callable[[str, Any, Iterator[Tensor]], Any]
    # from the value to what travels, tensors into the list; None: as it is
    dump: Callable[[Any, list[Tensor]], Any] | None = None
    plain: frozenset[type] = frozenset()  # types of values that are taken as they come


class Content(NamedTuple):
    """The content of a message, as `RpcClient` and `RpcServer` take it."""

    body: dict[str, Any]
    tensors: list[Tensor]


class Message:
    """The base of all messages, which are frozen dataclasses: their fields are what travels."""

    _values: ClassVar[dict[str, FieldCodec]] = {}  # of fields in the header
    _tensors: ClassVar[dict[str, FieldCodec]] = {}  # of fields beside it
    # fields in the header that don't travel as they are
    _dumped: ClassVar[list[tuple[str, Callable[[Any, list[Tensor]], Any]]]] = []

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hints = {
            name: hint
            for name, hint in get_type_hints(cls).items()
            if get_origin(hint) is not ClassVar
        }
        cls._tensors = {name: _TENSORS[hint] for name, hint in hints.items() if hint in _TENSORS}
        cls._values = {name: _codec(hint) for name, hint in hints.items() if hint not in _TENSORS}
        cls._dumped = [
            (name, codec.dump) for name, codec in cls._values.items() if codec.dump is not None
        ]

    def pack(self) -> Content:
        """Write as what travels.

        Tensors are not copied: they have to stay as they are until they have arrived.
        """
        tensors: list[Tensor] = []
        return Content(self.dump(tensors), tensors)

    @classmethod
    def unpack(cls, body: Mapping[str, Any], tensors: Sequence[Tensor]) -> Self:
        """Read what `pack` has written. Raises one of `MALFORMED` for anything else."""
        rest = iter(tensors)
        found = cls.load(body, rest)
        if next(rest, None) is not None:
            raise ValueError(f"{cls.__name__} has not so many tensors")
        return found

    def dump(self, tensors: list[Tensor]) -> dict[str, Any]:
        """Write what stands in the header, and add the tensors to the list."""
        body = dict(vars(self))
        for name in self._tensors:
            del body[name]
        for name, dump in self._dumped:
            body[name] = dump(body[name], tensors)
        for name in self._tensors:
            value = getattr(self, name)
            tensors += value if isinstance(value, tuple) else (value,)
        return body

    @classmethod
    def load(cls, body: Mapping[str, Any], tensors: Iterator[Tensor]) -> Self:
        """Read what `dump` has written, taking as many of the tensors as there are fields for
        them.
        """
        if not isinstance(body, Mapping):
            raise TypeError(f"{cls.__name__} is no {body!r:.100}")
        message = cls.__new__(cls)
        fields = vars(message)  # of a frozen dataclass: filled here without a call for each
        for name, codec in cls._values.items():
            value = body[name]
            fields[name] = value if type(value) in codec.plain else codec.load(name, value, tensors)
        if len(body) > len(fields):
            raise LookupError(
                f"{cls.__name__} has no {', '.join(map(repr, body.keys() - fields.keys())):.100}"
            )
        for name, codec in cls._tensors.items():
            fields[name] = codec.load(name, None, tensors)
        return message


@dataclass(frozen=True)
class Acknowledged(Message):
    """The reply to what has been done, or is kept."""


R = TypeVar("R", bound=Message)


class Request(Message, Generic[R]):
    """The base of all requests of workers, each with the class of its reply.

    `kind` is its name on the wire, and in statistics.
    """

    kind: ClassVar[str]
    reply: ClassVar[type[Message]]

    def __init_subclass__(cls, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind
        (cls.reply,) = (get_args(base)[0] for base in vars(cls)["__orig_bases__"])

    @property
    def step_served(self) -> int:
        """Return the step that it is about, for the timeline; 0: none."""
        return max(getattr(self, "step", 0), 0)


# from a worker and its request to the reply; None: it waits
Handlers = dict[type[Request[Any]], Callable[[int, Any], Message | None]]


class SentRequest(NamedTuple, Generic[R]):
    """A request under way to a server."""

    caller: RpcClient
    number: int
    request: type[Request[R]]

    def wait(self, seconds: float) -> R:
        """Wait for the reply. Raises what `RpcClient.wait_for_answer` raises."""
        return _replied(
            self.request, self.caller, self.caller.wait_for_answer(self.number, seconds)
        )


def send(caller: RpcClient, request: Request[R], seconds: float) -> SentRequest[R]:
    """Send a request.

    Its tensors have to stay as they are until the reply has come. Raises what `RpcClient.send`
    raises.
    """
    body, tensors = request.pack()
    number = caller.send(
        request.kind, step=request.step_served, body=body, tensors=tensors, seconds=seconds
    )
    return SentRequest(caller, number, type(request))


def call(caller: RpcClient, request: Request[R], seconds: float) -> R:
    """Send a request and wait for its reply. Raises what `RpcClient.call` raises."""
    body, tensors = request.pack()
    answer = caller.call(
        request.kind, step=request.step_served, body=body, tensors=tensors, seconds=seconds
    )
    return _replied(type(request), caller, answer)


def _replied(request: type[Request[R]], caller: RpcClient, answer: RpcMessage) -> R:
    try:
        return request.reply.unpack(answer.body, answer.tensors)  # type: ignore[return-value]
    except MALFORMED as error:
        raise Mismatch(
            f"{caller.who} answered {request.kind} with something else: {error}"
        ) from error


def _of(*types: type) -> FieldCodec:
    """Carry values of these types as they are."""

    def load(name: str, value: Any, tensors: Iterator[Tensor]) -> Any:
        if type(value) not in types:
            raise TypeError(f"{name} is {value!r:.100}")
        return value

    return FieldCodec(load, plain=frozenset(types))


def _index(name: str, value: Any, tensors: Iterator[Tensor]) -> Any:
    """Check a number that is counted from 0 on: with a negative one Python would count from the
    end.
    """
    if type(value) is not int or value < 0:
        raise UsageError(f"there is no {name} {value!r:.100}")
    return value


def _tensor(name: str, value: Any, tensors: Iterator[Tensor]) -> Tensor:
    found = next(tensors, None)
    if found is None:
        raise LookupError(f"there is no tensor {name}")
    return found


def _optional(one: FieldCodec) -> FieldCodec:
    def load(name: str, value: Any, tensors: Iterator[Tensor]) -> Any:
        return None if value is None else one.load(name, value, tensors)

    def dump(value: Any, tensors: list[Tensor]) -> Any:
        return None if value is None or one.dump is None else one.dump(value, tensors)

    return FieldCodec(load, one.dump and dump, one.plain | {NoneType})


def _list(each: FieldCodec, length: int | None = None) -> FieldCodec:
    """Carry a tuple, of this length if there is one."""

    def load(name: str, value: Any, tensors: Iterator[Tensor]) -> Any:
        if not isinstance(value, list | tuple) or len(value) != (
            len(value) if length is None else length
        ):
            raise TypeError(f"{name} is {value!r:.100}")
        return tuple([each.load(name, one, tensors) for one in value])

    def dump(value: Any, tensors: list[Tensor]) -> Any:
        return value if each.dump is None else [each.dump(one, tensors) for one in value]

    return FieldCodec(load, each.dump and dump)


def _pair(first: FieldCodec, second: FieldCodec) -> FieldCodec:
    """Carry a tuple of two plain values of different types."""

    def load(name: str, value: Any, tensors: Iterator[Tensor]) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise TypeError(f"{name} is {value!r:.100}")
        return first.load(name, value[0], tensors), second.load(name, value[1], tensors)

    return FieldCodec(load)


def _message(kind: type[Message]) -> FieldCodec:
    return FieldCodec(
        lambda name, value, tensors: kind.load(value, tensors),
        lambda value, tensors: value.dump(tensors),
    )


def _codec(hint: Any) -> FieldCodec:
    """Codec for fields of this type. Raises `AssertionError` for a type without one."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union) and args[1:] == (NoneType,):
        return _optional(_codec(args[0]))
    if origin is tuple and args[1:] == (...,):
        return _list(_codec(args[0]))
    if origin is tuple and len({*args}) == 1:
        return _list(_codec(args[0]), len(args))
    if origin is tuple and len(args) == 2:
        return _pair(*map(_codec, args))
    assert isinstance(hint, type) and issubclass(hint, Message), (
        f"a message can't have a field of type {hint}"
    )
    return _message(hint)


_PLAIN: dict[Any, FieldCodec] = {
    Any: FieldCodec(lambda name, value, tensors: value),
    Index: FieldCodec(_index),
    Mapping[str, Any]: _of(dict),
    bool: _of(bool),
    bytes: _of(bytes),
    float: _of(float, int),
    int: _of(int),
    str: _of(str),
}
_TENSORS: dict[Any, FieldCodec] = {
    Tensor: FieldCodec(_tensor),
    tuple[Tensor, ...]: FieldCodec(lambda name, value, tensors: tuple(tensors)),
}
