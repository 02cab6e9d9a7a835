"""Codecs: the sum of a group through a coding, with the same bits on every rank.

    gathered         n payloads, one stage: every rank sends its message to all; all decode the
                     messages and add them in rank order
    scattered        2 payloads, two stages: each piece goes to the rank that owns it; the owner
                     adds, encodes the sum again, and sends it to all

    error_feedback   x + residual is sent; the new residual is the part that did not arrive
                     (Seide et al. 2014, Karimireddy et al. 2019)

A codec is plain data. `init` makes its state, and `sum` takes the state and returns a new one. So
the state can be saved, and a failed step leaves it as it was. `sum` is a generator: each value that
it yields is awaited one stage further (see `comm/hierarchy/staged_executor.py`).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Size, Tensor

from paceline.codec.coding import Coding, exact, parts, room
from paceline.comm.group_protocol import Group, UncheckedAllReduce, Work, piece_bounds
from paceline.errors import UsageError
from paceline.formatting import spell

State = dict[str, Any]  # of tensors, numbers and such dicts


class Sum(NamedTuple):
    """The result of a sum: the total, and how to subtract what has arrived."""

    total: Tensor  # the same bits on every rank
    # subtracts this rank's part of the total from a tensor, perhaps the one that was given
    settle: Callable[[Tensor], None]
    state: State


Way = Generator[Work[Any], Any, Sum]


@dataclass(frozen=True)
class Wire:
    """The groups that a codec sends through, one of the same ranks for each stage; and the
    circumstances of this sum.

    `scale` is what gradients are multiplied by (of a GradScaler): residuals are kept without it.
    `step` counts the sums before this one. `draw` is the source of random draws.
    """

    groups: tuple[Group, ...]
    scale: float = 1.0
    step: int = 0
    draw: torch.Generator | None = None

    @property
    def group(self) -> Group:
        """The group of this stage."""
        return self.groups[0]

    def after(self, stages: int) -> Wire:
        """Make a wire that begins so many stages later."""
        return replace(self, groups=self.groups[stages:])


class Codec(Protocol):
    """A way to sum 1-D float32 tensors over a group.

    Each holds tensors of some shapes, one after the other. Equal ones are the same.
    """

    def __hash__(self) -> int: ...

    @property
    def stages(self) -> int:
        """The largest number of times that `sum` yields."""
        ...

    def choose(self, name: str, shape: Size) -> Codec:
        """Choose the codec for a tensor with this name and shape: itself, unless it decides by
        those.
        """
        ...

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        """Make the state at the beginning."""
        ...

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        """Sum `x` over all ranks, which call it with the same shapes.

        `x` and `state` stay as they are.
        """
        ...


@runtime_checkable
class Summing(Protocol):
    """Tells a codec from a coding."""

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way: ...


def lift(given: Codec | Coding) -> Codec:
    """Make a codec of a codec or coding: `exact()` is the group's own sum; others are gathered
    if they are sparse, else scattered.
    """
    if isinstance(given, Summing):
        return given
    if isinstance(given, exact):
        return plain()
    if not hasattr(given, "layout"):
        raise UsageError(
            f"a codec is wanted, such as int8() or error_feedback(topk(0.01)), got {given!r}"
        )
    return gathered(given) if _sparse(given) else scattered(given)


class _Simple:
    """The common part of codecs without choice and without state."""

    def choose(self, name: str, shape: Size) -> Any:
        return self

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        return {}


@dataclass(frozen=True)
class plain(_Simple):
    """The group's own all-reduce, which `exact` stands for: no word of the notation."""

    stages = 1

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        start = (
            wire.group.all_reduce_agreed
            if isinstance(wire.group, UncheckedAllReduce)
            else wire.group.all_reduce
        )
        total = yield start(x)
        return Sum(total, lambda y: _take(y, x), state)


@dataclass(frozen=True)
class gathered(_Simple):
    """Every rank gets every message: n payloads come in.

    >>> pl.start(sync=pl.AllReduce(codec=pl.gathered(pl.int8())))

    Best for few ranks, and for codings whose sum is no smaller, such as topk.
    """

    coding: Coding

    __repr__ = spell
    stages = 1

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        whole, message = room(self.coding, x.numel(), x.device)
        self.coding.encode(x, message, wire.draw)
        everyones = yield wire.group.all_gather(whole)
        total = torch.empty_like(x)
        for rank, theirs in enumerate(everyones):
            (self.coding.add if rank else self.coding.decode)(
                parts(self.coding, x.numel(), theirs), total
            )
        return Sum(total, lambda y: self.coding.add(message, y, minus=True), state)


@dataclass(frozen=True)
class scattered(_Simple):
    """Every rank adds one piece and sends the sum, encoded again, to all.

    >>> pl.start(sync=pl.AllReduce(codec=pl.scattered(pl.int4())))

    That takes two payloads, for any number of ranks. The loss of the second encoding counts as lost
    by the rank that owns the piece.
    """

    coding: Coding

    __repr__ = spell
    stages = 2

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        me, size = wire.group.rank, wire.group.size
        if size <= 2:  # gathering costs no more, and loses less
            return (yield from gathered(self.coding).sum(x, shapes, state, wire))
        cut = [x[start:stop] for start, stop in piece_bounds(x.numel(), size)]
        mine = [room(self.coding, piece.numel(), x.device) for piece in cut]
        for piece, (_, message) in zip(cut, mine, strict=True):
            self.coding.encode(piece, message, wire.draw)
        theirs = yield wire.group.all_to_all([whole for whole, _ in mine])
        owned = torch.empty_like(cut[me])
        for rank, whole in enumerate(theirs):
            (self.coding.add if rank else self.coding.decode)(
                parts(self.coding, owned.numel(), whole), owned
            )
        again, message = room(self.coding, owned.numel(), x.device)
        self.coding.encode(owned, message, wire.draw)
        sums = yield wire.after(1).group.all_gather(again)
        total = torch.empty_like(x)
        for (start, stop), whole in zip(piece_bounds(x.numel(), size), sums, strict=True):
            self.coding.decode(parts(self.coding, stop - start, whole), total[start:stop])

        def settle(y: Tensor) -> None:
            places = piece_bounds(x.numel(), size)
            for (start, stop), (_, sent) in zip(places, mine, strict=True):
                self.coding.add(sent, y[start:stop], minus=True)
            start, stop = places[me]
            y[start:stop].add_(owned).sub_(total[start:stop])

        return Sum(total, settle, state)


@dataclass(frozen=True)
class error_feedback:
    """Keeps what `codec` loses as a residual, and adds that to what is sent the next time.

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.topk(0.01))))

    The sum of all that arrived, plus what is kept, is the sum of all that was given. When the total
    isn't finite (a GradScaler will skip the step) nothing is kept of it. State: a residual as large
    as the tensors.
    """

    codec: Codec | Coding

    __repr__ = spell

    def __post_init__(self) -> None:
        lift(self.codec)

    @property
    def stages(self) -> int:
        return lift(self.codec).stages

    def choose(self, name: str, shape: Size) -> Codec:
        chosen = lift(self.codec).choose(name, shape)
        return chosen if isinstance(chosen, plain) else error_feedback(chosen)

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        numel = sum(map(math.prod, shapes))
        return {
            "residual": torch.zeros(numel, dtype=torch.float32, device=device),
            "inner": lift(self.codec).init(shapes, device),
        }

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        left = torch.add(x, state["residual"], alpha=wire.scale)
        inner = yield from lift(self.codec).sum(left, shapes, state["inner"], wire)
        if not finite(inner.total):
            return Sum(inner.total, lambda y: _take(y, x), state)
        inner.settle(left)  # now what is left of it
        if wire.scale != 1.0:
            left /= wire.scale

        def settle(y: Tensor) -> None:
            y.sub_(x)  # lost nothing: it is in the total, or kept here

        return Sum(inner.total, settle, {"residual": left, "inner": inner.state})


@runtime_checkable
class Predicate(Protocol):
    """The question that `where` asks about tensors."""

    def holds(self, name: str, shape: Size) -> bool:
        """Whether the answer is yes for a tensor with this name and shape."""
        ...


@dataclass(frozen=True)
class smaller:
    """Selects tensors with fewer than `numel` elements.

    >>> pl.where(pl.smaller(10_000), pl.exact(), pl.int8())
    """

    numel: int

    __repr__ = spell

    def holds(self, name: str, shape: Size) -> bool:
        return math.prod(shape) < self.numel


@dataclass(frozen=True)
class named:
    """Selects tensors whose name fits a pattern of the shell: `named("*.bias")`.

    >>> pl.where(pl.named("*.bias"), pl.exact(), pl.int8())
    """

    pattern: str

    __repr__ = spell

    def holds(self, name: str, shape: Size) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class where:
    """Uses `then` for tensors that fulfil `predicate`, and `otherwise` for all others.

    >>> pl.start(sync=pl.AllReduce(codec=pl.where(pl.smaller(10_000), pl.exact(), pl.int8())))
    """

    predicate: Predicate
    then: Codec | Coding
    otherwise: Codec | Coding

    __repr__ = spell

    def __post_init__(self) -> None:
        if not isinstance(self.predicate, Predicate):
            raise UsageError(
                "where wants a predicate first, such as smaller(10_000) or named('*.bias'), got "
                f"{self.predicate!r}"
            )
        lift(self.then), lift(self.otherwise)

    @property
    def stages(self) -> int:
        return max(lift(self.then).stages, lift(self.otherwise).stages)

    def choose(self, name: str, shape: Size) -> Codec:
        return lift(self.then if self.predicate.holds(name, shape) else self.otherwise).choose(
            name, shape
        )

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        raise AssertionError("where has to choose first")

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        raise AssertionError("where has to choose first")


@dataclass(frozen=True)
class after:
    """Uses `codec` from the sum number `steps` on (0 is the first), `before` until then: a warm-up.

    >>> pl.start(sync=pl.AllReduce(codec=pl.after(500, pl.error_feedback(pl.powersgd(4)))))
    """

    steps: int
    codec: Codec | Coding
    before: Codec | Coding = field(default_factory=exact)

    __repr__ = spell

    def __post_init__(self) -> None:
        lift(self.codec), lift(self.before)
        if self.steps < 0:
            raise UsageError(f"{self!r}: steps is {self.steps}, and has to be 0 or more")

    @property
    def stages(self) -> int:
        return max(lift(self.codec).stages, lift(self.before).stages)

    def choose(self, name: str, shape: Size) -> Codec:
        return after(
            self.steps, lift(self.codec).choose(name, shape), lift(self.before).choose(name, shape)
        )

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        return {
            "codec": lift(self.codec).init(shapes, device),
            "before": lift(self.before).init(shapes, device),
        }

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        part, codec = ("codec", self.codec) if wire.step >= self.steps else ("before", self.before)
        inner = yield from lift(codec).sum(x, shapes, state[part], wire)
        return inner._replace(state=state | {part: inner.state})


def finite(x: Tensor) -> bool:
    """Whether all of `x` is finite; looks closer only where the sum isn't."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def keeps(state: State) -> bool:
    """Whether a state holds a residual somewhere."""
    return any(
        key == "residual" or (isinstance(value, dict) and keeps(value))
        for key, value in state.items()
    )


def residuals(state: State) -> State:
    """Return the residuals of a state, which this rank alone keeps: all else is the same on all
    ranks.
    """
    return {
        key: residuals(value) if isinstance(value, dict) else value
        for key, value in state.items()
        if key == "residual" or isinstance(value, dict)
    }


def alike(state: State, other: State) -> bool:
    """Whether two states hold residuals of the same tensors, so that they can be merged."""
    return state.keys() == other.keys() and all(
        alike(value, other[key]) if isinstance(value, dict) else value.shape == other[key].shape
        for key, value in state.items()
    )


def merge(states: Sequence[State]) -> State:
    """Merge states into one of a rank that goes on for several, itself first: it sends later what
    they kept; all else is the first one's.

    Residuals are parts of a sum, so their sum is what has to survive when ranks leave.
    """
    first = states[0]
    merged: State = {}
    for key, value in first.items():
        if key == "residual":
            merged[key] = torch.stack([state[key].to(value) for state in states]).sum(0)
        else:
            merged[key] = (
                merge([state[key] for state in states]) if isinstance(value, dict) else value
            )
    return merged


def fresh(state: State) -> State:
    """Make the state of a rank that has joined those with `state`: it has kept nothing yet."""
    made: State = {}
    for key, value in state.items():
        made[key] = (
            torch.zeros_like(value)
            if key == "residual"
            else fresh(value)
            if isinstance(value, dict)
            else value
        )
    return made


def _take(y: Tensor, x: Tensor) -> None:
    y.sub_(x)


def _sparse(coding: Coding) -> bool:
    """Whether a coding keeps few elements, so that the sum of two has more."""
    outer = getattr(coding, "outer", coding)
    return bool(_sparse(outer)) if outer is not coding else hasattr(coding, "fraction")
