"""The memory of parameters that are gathered together: flat, each worker keeps one part of it, and
all of it only when it is used.

               memory (all workers' parts)       part (this worker's)        what the script sees
zero=1, 2      stays                             within the memory           whole parameters;
                                                 optimizers step pieces
zero=3         while the unit is used            stays by itself             pieces; whole
                                                 parameters while the unit is used

A whole parameter is a view of the memory, and its piece a view of the part: nothing is copied
between them but by the gathering itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.axis_meter import AxisMeter
from paceline.comm.group import Group, Work, gather_into
from paceline.errors import UsageError
from paceline.parallel.meta import CPU
from paceline.parallel.sharding.layout import FlatLayout


class Held(NamedTuple):
    """A parameter as a model has it: its name, and each module with the name that it has there."""

    name: str
    parameter: Parameter
    places: tuple[tuple[nn.Module, str], ...]


class FlatMemory:
    """Parameters of one unit, dtype and need of gradients.

    `group`: the workers that have parts; to gather is collective.

    `dtype`: what whole parameters are gathered in; None for that of the pieces. `frees`: the memory
    is released between uses. `meter` measures the gathering. `home` is the device of parameters
    that have no memory yet.
    """

    def __init__(
        self,
        unit: str,
        held: Sequence[Held],
        group: Group,
        *,
        frees: bool,
        dtype: torch.dtype | None = None,
        meter: AxisMeter | None = None,
        home: torch.device = CPU,
    ) -> None:
        self.unit, self.held, self._group, self.frees, self.rank = (
            unit,
            list(held),
            group,
            frees,
            group.rank,
        )
        self._meter, self._begun = AxisMeter("shard") if meter is None else meter, 0
        first = held[0].parameter
        self.layout = FlatLayout(tuple(one.parameter.numel() for one in held), group.size)
        # in the memory, and in this worker's part
        self.spans, self.places = self.layout.spans(), self.layout.within(group.rank)
        self.trained, self.kept_dtype, self.dtype = (
            first.requires_grad,
            first.dtype,
            dtype or first.dtype,
        )
        device = home if first.is_meta else first.device
        self._memory = torch.zeros(
            self.layout.padded, dtype=self.dtype if frees else self.kept_dtype, device=device
        )
        # what is written there doesn't count as a change of the whole parameters
        self._raw = self._memory.data
        chunks = list(self._raw.chunk(group.size))
        self._chunks, mine = chunks, chunks[group.rank]
        self.part = (
            torch.zeros(self.layout.part, dtype=self.kept_dtype, device=device) if frees else mine
        )
        self._fill()
        views = [
            self._memory[start:stop].view(one.parameter.shape)
            for one, (start, stop) in zip(held, self.spans, strict=True)
        ]
        places = [self.part[start:stop] for start, stop in self.places]
        if frees:
            self.wholes = [Parameter(view, requires_grad=self.trained) for view in views]
            self._views, self._nothing = (
                [whole.data for whole in self.wholes],
                self._memory.new_empty(0),
            )
            self.pieces = [
                _become(one.parameter, place) for one, place in zip(held, places, strict=True)
            ]
            for one, piece in zip(held, self.pieces, strict=True):
                if self.trained:
                    piece.register_post_accumulate_grad_hook(partial(_refuse_piece, one.name))
        else:
            self.wholes = [
                _become(one.parameter, view) for one, view in zip(held, views, strict=True)
            ]
            self.pieces = [Parameter(place, requires_grad=self.trained) for place in places]
        given = zip(held, *((self.pieces,) if frees else (self.wholes, self.pieces)), strict=True)
        self._given = [
            (one.name, p, p.data_ptr()) for one, *found in given for p in found if p.numel()
        ]
        self._nbytes = self._memory.untyped_storage().nbytes()
        self.whole = True
        if frees:
            self.release()

    def _fill(self) -> None:
        """Take the parameters' values, as far as they have some; all workers have the same."""
        pieces = zip(self.layout.pieces(self.rank), self.places, strict=True)
        for one, (start, stop), (piece, place) in zip(self.held, self.spans, pieces, strict=True):
            if one.parameter.is_meta:
                continue
            values = one.parameter.detach().reshape(-1)
            if self.frees:
                self.part[slice(*place)].copy_(values[slice(*piece)])
            else:
                self._raw[start:stop].copy_(values)

    @property
    def _named(self) -> str:
        return f"the parameters of {self.unit or 'the root'}"

    def begin_gather(self, why: str = "") -> Work[list[Tensor]]:
        """Begin to make the memory whole from the parts of all workers; `why` is compared
        between them.
        """
        if self.frees and not self.whole:
            self._memory.untyped_storage().resize_(self._nbytes)
        mine = self._chunks[self._group.rank]
        if self.frees:
            mine.copy_(self.part)
        self._begun = time.perf_counter_ns()
        return gather_into(self._group, mine, self._chunks, name=self._named + why)

    def end_gather(self, work: Work[list[Tensor]]) -> None:
        """Wait until the memory is whole."""
        gathered = self._meter.wait(work, self._named, self._begun)
        for rank, (chunk, found) in enumerate(zip(self._chunks, gathered, strict=True)):
            if rank != self.rank and found is not chunk:
                chunk.copy_(found)
        self.whole = True
        if self.frees:
            torch._C._autograd._unsafe_set_version_counter((self._memory,), (self._version,))
            for whole, view in zip(self.wholes, self._views, strict=True):
                whole.data = view

    def gather(self) -> None:
        """Make the memory whole, unless it is."""
        if not self.whole:
            self.check()
            self.end_gather(self.begin_gather())

    def release(self) -> None:
        """Free the memory, of which this worker's part stays."""
        if self.frees:
            # until it is whole again, autograd takes what it has saved of it for changed, and
            # nobody reads freed memory
            if self.whole:
                self._version = self._memory._version
                torch._C._autograd._unsafe_set_version_counter(
                    (self._memory,), (self._version + 1,)
                )
                for whole in self.wholes:
                    whole.data = self._nothing
            self.whole = False
            self._memory.untyped_storage().resize_(0)

    def check(self) -> None:
        """Raise `UsageError` where a script has changed what needs gradients, which the layout
        goes by.
        """
        for one, piece in zip(self.held, self.pieces, strict=True):
            wanted = piece.requires_grad if self.frees else one.parameter.requires_grad
            if wanted != self.trained:
                refuse_change(one.name, trained=self.trained)

    def check_memory(self) -> None:
        """Raise `UsageError` where a script has given a parameter other memory, or a hook that
        nothing calls.
        """
        for name, parameter, place in self._given:
            if parameter.data_ptr() != place:
                raise UsageError(
                    f"{name} is {parameter.dtype} in other memory than shard() gave it "
                    f"({self.kept_dtype}), which optimizers don't step: "
                    "call model.float() and the like before run.prepare, and write values in place "
                    "(p.data.copy_(x)), or by run.whole(p)"
                )
            if self.frees and has_script_hook(parameter):
                refuse_hook(name)

    def check_gradients(self) -> None:
        """Raise `UsageError` where a script has set the gradient of a whole parameter, by which
        nothing steps.
        """
        for one, whole in zip(self.held, self.wholes, strict=True) if not self.frees else ():
            if whole.grad is not None and bool(whole.grad.any()):
                raise UsageError(
                    f"{one.name} was given a gradient by the script (p.grad = ...), and with "
                    "shard(zero=1) or (zero=2) optimizers step by "
                    "those of pieces: let backward make it, or set it in a block of run.whole(p)"
                )

    def show(self, *, whole: bool) -> None:
        """Put the whole parameters into the modules that use them, or the pieces again.

        Raises `UsageError` where a script has put others there, which would not be used.
        """
        for one, *both in zip(self.held, self.wholes, self.pieces, strict=True) if whole else ():
            for module, name in one.places:
                if all(module._parameters.get(name) is not known for known in both):
                    raise UsageError(
                        f"{one.name} is another parameter than the one that shard(zero=3) has cut, "
                        "and would be replaced "
                        "(functional_call, a new parameter): say zero=2, where functional_call "
                        "takes what it is given, or change "
                        "values by run.whole(p)"
                    )
        for one, parameter in zip(self.held, self.wholes if whole else self.pieces, strict=True):
            for module, name in one.places:
                if type(module).__setattr__ is nn.Module.__setattr__:
                    module._parameters[name] = parameter
                else:  # it keeps its parameters elsewhere too, as nn.LSTM does
                    setattr(module, name, parameter)


def _refuse_piece(name: str, _: Tensor) -> NoReturn:
    """Raise `UsageError` for a gradient that autograd gives to a piece, as only those of whole
    parameters are summed over workers.
    """
    raise UsageError(
        f"the loss uses {name} itself, of which each worker has a piece while its unit isn't "
        "running (shard(zero=3)), so losses would "
        "differ: say zero=2, where parameters are whole, or let the optimizer do a penalty "
        "(weight_decay)"
    )


def has_script_hook(piece: Parameter) -> bool:
    """Whether a script has registered a hook for the gradient of a piece, beside those of
    paceline.
    """
    hooks = [
        getattr(hook, "func", hook) for hook in (piece._post_accumulate_grad_hooks or {}).values()
    ]
    homes = [getattr(hook, "__module__", None) or "" for hook in hooks]
    return bool(piece._backward_hooks) or not all(home.startswith("paceline.") for home in homes)


def refuse_hook(name: str) -> NoReturn:
    """Raise `UsageError` for a hook on the gradient of a piece."""
    raise UsageError(
        f"{name} has a hook of the script for its gradient, which is not called: "
        "zero=3 makes the whole parameter anew "
        "each time; take the hook out, or say zero=2, where it sees this worker's gradient"
    )


def refuse_change(name: str, *, trained: bool) -> NoReturn:
    """Raise `UsageError` for a parameter that was `trained` when it was cut, and is frozen now,
    or the other way round.
    """
    raise UsageError(
        f"{name} was {'trained' if trained else 'frozen'} when the model was cut by shard(), and "
        "is not any more; set requires_grad before "
        "run.prepare"
    )


def _become(parameter: Parameter, memory: Tensor) -> Parameter:
    """Let a parameter be the one that it was, in other memory."""
    if parameter.is_meta:  # no other memory can be given to it
        torch.utils.swap_tensors(
            parameter, Parameter(memory, requires_grad=parameter.requires_grad)
        )
    else:
        with torch.no_grad():
            parameter.set_(memory)  # type: ignore[call-overload]
    return parameter
