"""Codecs: the sum of a group through a coding, with the same bits on every rank.

    gathered         n payloads, one stage: every rank sends its message to all ranks; each rank
                     decodes the messages and adds them in rank order
    scattered        2 payloads, two stages: each piece goes to the rank that owns it; the owner
                     adds the pieces, encodes the sum, and sends it to all ranks

    error_feedback   x + residual is sent; the new residual is the part that did not arrive
                     (Seide et al. 2014, Karimireddy et al. 2019)

A codec is plain data. `init` makes its state; `sum` takes a state and returns a new one. So the
state can be saved, and a failed step leaves it unchanged. `sum` is a generator: it yields the work
of each stage, and gets the result of that work back (see `comm/hierarchy/staged_executor.py`).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Size, Tensor

from paceline.codec.coding import Coding, exact, make_message, split_message
from paceline.comm.group_protocol import Group, UncheckedAllReduce, Work, piece_bounds
from paceline.errors import UsageError
from paceline.formatting import format_as_call

# The state of a codec: tensors and numbers by name, and nested dictionaries of these.
State = dict[str, Any]


class Sum(NamedTuple):
    """The result of a sum: the total, and a function that subtracts the part that arrived."""

    # The same bits on every rank.
    total: Tensor
    # Subtracts this rank's part of the total from a tensor. That may be the tensor that was summed.
    settle: Callable[[Tensor], None]
    state: State


# A sum in stages: it yields the work of each stage, and returns the result.
Way = Generator[Work[Any], Any, Sum]


@dataclass(frozen=True)
class Wire:
    """The groups that a codec sends through, and the circumstances of this sum.

    `groups` has one group for each stage; all of them have the same ranks. `scale` is the factor
    of a GradScaler on the gradients; residuals are stored without it. `step` is the number of sums
    before this one. Random numbers are drawn from `draw`.
    """

    groups: tuple[Group, ...]
    scale: float = 1.0
    step: int = 0
    draw: torch.Generator | None = None

    @property
    def stage_group(self) -> Group:
        """Group of the next stage."""
        return self.groups[0]

    def skip_stages(self, stages: int) -> Wire:
        """Make a wire that begins `stages` stages later."""
        return replace(self, groups=self.groups[stages:])


class Codec(Protocol):
    """A way to sum 1-D float32 tensors over a group.

    Each 1-D tensor holds the elements of several tensors, one after the other. Codecs that compare
    equal work in the same way.
    """

    def __hash__(self) -> int: ...

    @property
    def stages(self) -> int:
        """Largest number of stages of a sum: how often `sum` yields."""
        ...

    def choose(self, name: str, shape: Size) -> Codec:
        """Choose the codec for a tensor with this name and shape.

        This is the codec itself, unless it decides by name or shape.
        """
        ...

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        """Make the state before the first sum of tensors with these shapes."""
        ...

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        """Sum `x` over all ranks.

        All ranks pass the same shapes. `x` and `state` are not modified.
        """
        ...


@runtime_checkable
class SumsTensors(Protocol):
    """The method that only codecs have, to tell them from codings."""

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way: ...


def to_codec(given: Codec | Coding) -> Codec:
    """Turn a coding into a codec; codecs are returned unchanged.

    `exact()` becomes the group's own sum. Sparse codings are gathered, all others are scattered.
    """
    if isinstance(given, SumsTensors):
        return given
    if isinstance(given, exact):
        return plain()
    if not hasattr(given, "layout"):
        raise UsageError(
            f"a codec is wanted, such as int8() or error_feedback(topk(0.01)), got {given!r}"
        )
    return gathered(given) if _is_sparse(given) else scattered(given)


class _StatelessCodec:
    """A base for codecs that have no state and treat all tensors alike."""

    def choose(self, name: str, shape: Size) -> Any:
        return self

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        return {}


@dataclass(frozen=True)
class plain(_StatelessCodec):
    """Uses the group's own all-reduce. It is written as `exact`, and has no word of its own."""

    stages = 1

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        # All ranks pass the same shapes, so the group's check of them can be skipped.
        all_reduce = (
            wire.stage_group.all_reduce_agreed
            if isinstance(wire.stage_group, UncheckedAllReduce)
            else wire.stage_group.all_reduce
        )
        total = yield all_reduce(x)
        return Sum(total, lambda y: _subtract_values(y, x), state)


@dataclass(frozen=True)
class gathered(_StatelessCodec):
    """Sends the message of every rank to all ranks: each rank receives n payloads.

    >>> pl.start(sync=pl.AllReduce(codec=pl.gathered(pl.int8())))

    This is best for few ranks, and for codings like topk, whose sum doesn't become smaller when it
    is encoded again.
    """

    coding: Coding

    __repr__ = format_as_call
    stages = 1

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        payload, message = make_message(self.coding, x.numel(), x.device)
        self.coding.encode(x, message, wire.draw)
        payloads = yield wire.stage_group.all_gather(payload)
        # All ranks add in rank order, or the totals would differ in their last bits.
        total = torch.empty_like(x)
        for rank, received in enumerate(payloads):
            (self.coding.add if rank else self.coding.decode)(
                split_message(self.coding, x.numel(), received), total
            )
        return Sum(total, lambda y: self.coding.add(message, y, minus=True), state)


@dataclass(frozen=True)
class scattered(_StatelessCodec):
    """Adds each piece on the rank that owns it, which encodes the sum again for all ranks.

    >>> pl.start(sync=pl.AllReduce(codec=pl.scattered(pl.int4())))

    Each rank receives two payloads, for any number of ranks. The error of the second encoding
    counts as an error of the rank that owns the piece.
    """

    coding: Coding

    __repr__ = format_as_call
    stages = 2

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        me, size = wire.stage_group.rank, wire.stage_group.size
        # With two ranks, gathering is as cheap, and encodes only once.
        if size <= 2:
            return (yield from gathered(self.coding).sum(x, shapes, state, wire))
        # First stage: encode the piece of each rank, and add the messages for this rank's piece.
        pieces = [x[start:stop] for start, stop in piece_bounds(x.numel(), size)]
        outgoing = [make_message(self.coding, piece.numel(), x.device) for piece in pieces]
        for piece, (_, message) in zip(pieces, outgoing, strict=True):
            self.coding.encode(piece, message, wire.draw)
        incoming = yield wire.stage_group.all_to_all([payload for payload, _ in outgoing])
        owned = torch.empty_like(pieces[me])
        for rank, payload in enumerate(incoming):
            (self.coding.add if rank else self.coding.decode)(
                split_message(self.coding, owned.numel(), payload), owned
            )
        # Second stage: share the sums. The owner decodes its own message as well, so that it gets
        # the same bits as all other ranks.
        owned_payload, message = make_message(self.coding, owned.numel(), x.device)
        self.coding.encode(owned, message, wire.draw)
        sums = yield wire.skip_stages(1).stage_group.all_gather(owned_payload)
        total = torch.empty_like(x)
        for (start, stop), payload in zip(piece_bounds(x.numel(), size), sums, strict=True):
            self.coding.decode(split_message(self.coding, stop - start, payload), total[start:stop])

        def settle(y: Tensor) -> None:
            bounds = piece_bounds(x.numel(), size)
            for (start, stop), (_, message) in zip(bounds, outgoing, strict=True):
                self.coding.add(message, y[start:stop], minus=True)
            # The owner also accounts for the error of the second encoding.
            start, stop = bounds[me]
            y[start:stop].add_(owned).sub_(total[start:stop])

        return Sum(total, settle, state)


@dataclass(frozen=True)
class error_feedback:
    """Stores the error of `codec` as a residual, and adds it to the next tensor that is sent.

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.topk(0.01))))

    All totals so far plus the residuals of all ranks equal the sum of all tensors that were given.
    If a total isn't finite (a GradScaler then skips the step), the residual stays unchanged. The
    state has a residual as large as the tensors.
    """

    codec: Codec | Coding

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        to_codec(self.codec)

    @property
    def stages(self) -> int:
        return to_codec(self.codec).stages

    def choose(self, name: str, shape: Size) -> Codec:
        chosen = to_codec(self.codec).choose(name, shape)
        return chosen if isinstance(chosen, plain) else error_feedback(chosen)

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        numel = sum(map(math.prod, shapes))
        return {
            "residual": torch.zeros(numel, dtype=torch.float32, device=device),
            "inner": to_codec(self.codec).init(shapes, device),
        }

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        residual = torch.add(x, state["residual"], alpha=wire.scale)
        inner = yield from to_codec(self.codec).sum(residual, shapes, state["inner"], wire)
        if not is_finite(inner.total):
            return Sum(inner.total, lambda y: _subtract_values(y, x), state)
        # Until here it was the tensor that is sent; now it is the part that didn't arrive.
        inner.settle(residual)
        if wire.scale != 1.0:
            residual /= wire.scale

        def settle(y: Tensor) -> None:
            # Nothing of x is lost: it is in the total or in the residual.
            y.sub_(x)

        return Sum(inner.total, settle, {"residual": residual, "inner": inner.state})


@runtime_checkable
class Predicate(Protocol):
    """A condition on tensors, for `where`."""

    def holds(self, name: str, shape: Size) -> bool:
        """Whether a tensor with this name and shape fulfils the condition."""
        ...


@dataclass(frozen=True)
class smaller:
    """Selects tensors with fewer than `numel` elements.

    >>> pl.where(pl.smaller(10_000), pl.exact(), pl.int8())
    """

    numel: int

    __repr__ = format_as_call

    def holds(self, name: str, shape: Size) -> bool:
        return math.prod(shape) < self.numel


@dataclass(frozen=True)
class named:
    """Selects tensors whose name matches a shell pattern: `named("*.bias")`.

    >>> pl.where(pl.named("*.bias"), pl.exact(), pl.int8())
    """

    pattern: str

    __repr__ = format_as_call

    def holds(self, name: str, shape: Size) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class where:
    """Uses `then` for tensors that fulfil `predicate`, and `otherwise` for all other tensors.

    >>> pl.start(sync=pl.AllReduce(codec=pl.where(pl.smaller(10_000), pl.exact(), pl.int8())))
    """

    predicate: Predicate
    then: Codec | Coding
    otherwise: Codec | Coding

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        if not isinstance(self.predicate, Predicate):
            raise UsageError(
                "where wants a predicate first, such as smaller(10_000) or named('*.bias'), got "
                f"{self.predicate!r}"
            )
        to_codec(self.then), to_codec(self.otherwise)

    @property
    def stages(self) -> int:
        return max(to_codec(self.then).stages, to_codec(self.otherwise).stages)

    def choose(self, name: str, shape: Size) -> Codec:
        return to_codec(self.then if self.predicate.holds(name, shape) else self.otherwise).choose(
            name, shape
        )

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        raise AssertionError("where has to choose first")

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        raise AssertionError("where has to choose first")


@dataclass(frozen=True)
class after:
    """Uses `before` for the first `steps` sums, as a warm-up, and `codec` from then on.

    >>> pl.start(sync=pl.AllReduce(codec=pl.after(500, pl.error_feedback(pl.powersgd(4)))))
    """

    steps: int
    codec: Codec | Coding
    before: Codec | Coding = field(default_factory=exact)

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        to_codec(self.codec), to_codec(self.before)
        if self.steps < 0:
            raise UsageError(f"{self!r}: steps is {self.steps}, and has to be 0 or more")

    @property
    def stages(self) -> int:
        return max(to_codec(self.codec).stages, to_codec(self.before).stages)

    def choose(self, name: str, shape: Size) -> Codec:
        return after(
            self.steps,
            to_codec(self.codec).choose(name, shape),
            to_codec(self.before).choose(name, shape),
        )

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        return {
            "codec": to_codec(self.codec).init(shapes, device),
            "before": to_codec(self.before).init(shapes, device),
        }

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        key, codec = ("codec", self.codec) if wire.step >= self.steps else ("before", self.before)
        inner = yield from to_codec(codec).sum(x, shapes, state[key], wire)
        return inner._replace(state=state | {key: inner.state})


def is_finite(x: Tensor) -> bool:
    """Whether all elements of `x` are finite."""
    # The sum is much cheaper, and settles most cases. It may overflow though all elements are
    # finite, so a sum that isn't finite calls for the full check.
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def holds_residual(state: State) -> bool:
    """Whether a state has a residual, perhaps in a nested dictionary."""
    return any(
        key == "residual" or (isinstance(value, dict) and holds_residual(value))
        for key, value in state.items()
    )


def pick_residuals(state: State) -> State:
    """Pick the residuals of a state.

    They are this rank's own; the rest of a state is the same on all ranks.
    """
    return {
        key: pick_residuals(value) if isinstance(value, dict) else value
        for key, value in state.items()
        if key == "residual" or isinstance(value, dict)
    }


def have_same_residuals(state: State, other: State) -> bool:
    """Whether two states have residuals of the same shapes, so that they can be merged."""
    return state.keys() == other.keys() and all(
        have_same_residuals(value, other[key])
        if isinstance(value, dict)
        else value.shape == other[key].shape
        for key, value in state.items()
    )


def merge_states(states: Sequence[State]) -> State:
    """Merge the states of several ranks into one, for the rank that continues for all of them.

    Its own state is the first. The residuals are added: they are parts of a sum, so their sum has
    to survive when ranks leave. The rest is taken from the first state.
    """
    first = states[0]
    merged: State = {}
    for key, value in first.items():
        if key == "residual":
            merged[key] = torch.stack([state[key].to(value) for state in states]).sum(0)
        else:
            merged[key] = (
                merge_states([state[key] for state in states]) if isinstance(value, dict) else value
            )
    return merged


def make_fresh_state(state: State) -> State:
    """Make the state of a rank that joins ranks with `state`: a copy whose residuals are zero."""
    joined: State = {}
    for key, value in state.items():
        joined[key] = (
            torch.zeros_like(value)
            if key == "residual"
            else make_fresh_state(value)
            if isinstance(value, dict)
            else value
        )
    return joined


def _subtract_values(y: Tensor, x: Tensor) -> None:
    y.sub_(x)


def _is_sparse(coding: Coding) -> bool:
    """Whether a coding sends only some elements, so that a sum of two has more than each."""
    outer = getattr(coding, "outer", coding)
    return bool(_is_sparse(outer)) if outer is not coding else hasattr(coding, "fraction")
