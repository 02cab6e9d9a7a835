"""Flat memory of parameters that are gathered together. Each worker always keeps one part of it.

             memory (all workers' parts)     part (this worker's)    what the script sees
zero=1, 2    stays                           within the memory       whole parameters; optimizers
                                                                     step pieces
zero=3       while the unit is used          stays by itself         pieces; whole parameters while
                                                                     the unit is used

A whole parameter is a view of the memory, and its piece is a view of the part. So only gathering
copies between them.
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
from paceline.comm.group_protocol import Group, Work, gather_into
from paceline.errors import UsageError
from paceline.parallel.meta import CPU
from paceline.parallel.sharding.flat_layout import FlatLayout
from paceline.parallel.torch_tensor import set_version


class ModelParameter(NamedTuple):
    """A parameter of a model: its name, and each module that has it, with its name there."""

    name: str
    parameter: Parameter
    places: tuple[tuple[nn.Module, str], ...]


class FlatMemory:
    """Parameters of one unit that have the same dtype, device and `requires_grad`.

    Invariants:
        `parameters`, `wholes`, `pieces`, `ranges` and `part_ranges` have an entry for each
        parameter, in one order. `_memory` and `_raw` are the same storage with two version
        counters. Writes to `_raw`, and to its `_chunks`, one for each rank, don't count as changes
        of whole parameters. Without `frees`: `own_part` is the chunk of this rank, and `is_whole`
        is always true. With `frees`: `own_part` is memory of its own. If `is_whole` is false, the
        storage has no bytes, whole parameters are empty, and `_version` is the counter to go on
        from.

    Args:
        unit: Name of the unit; "" for the root.
        held: Parameters, at least one.
        group: Workers that have parts. To gather is collective.
        frees: Whether the memory is released between uses (zero=3).
        dtype: dtype in which whole parameters are gathered. Default (None): that of the pieces.
        meter: Measures the gathering.
        home: Device of parameters that have no memory yet.
    """

    def __init__(
        self,
        unit: str,
        held: Sequence[ModelParameter],
        group: Group,
        *,
        frees: bool,
        dtype: torch.dtype | None = None,
        meter: AxisMeter | None = None,
        home: torch.device = CPU,
    ) -> None:
        self.unit, self.parameters, self._group, self.frees, self.rank = (
            unit,
            list(held),
            group,
            frees,
            group.rank,
        )
        self._meter, self._gather_began = AxisMeter("shard") if meter is None else meter, 0
        first = held[0].parameter
        self.layout = FlatLayout(tuple(one.parameter.numel() for one in held), group.size)
        # Ranges of the parameters in the memory, and of their pieces in this worker's part.
        self.ranges, self.part_ranges = (
            self.layout.parameter_ranges(),
            self.layout.part_ranges(group.rank),
        )
        self.is_trained, self.kept_dtype, self.dtype = (
            first.requires_grad,
            first.dtype,
            dtype or first.dtype,
        )
        device = home if first.is_meta else first.device
        self._memory = torch.zeros(
            self.layout.padded_numel, dtype=self.dtype if frees else self.kept_dtype, device=device
        )
        self._raw = self._memory.data
        chunks = list(self._raw.chunk(group.size))
        self._chunks, own_chunk = chunks, chunks[group.rank]
        self.own_part = (
            torch.zeros(self.layout.part_numel, dtype=self.kept_dtype, device=device)
            if frees
            else own_chunk
        )
        self._copy_values()
        views = [
            self._memory[start:stop].view(one.parameter.shape)
            for one, (start, stop) in zip(held, self.ranges, strict=True)
        ]
        places = [self.own_part[start:stop] for start, stop in self.part_ranges]
        # The model keeps its own parameter objects: with `frees` they become pieces, else wholes.
        if frees:
            self.wholes = [Parameter(view, requires_grad=self.is_trained) for view in views]
            self._views, self._no_elements = (
                [whole.data for whole in self.wholes],
                self._memory.new_empty(0),
            )
            self.pieces = [
                _give_memory(one.parameter, place) for one, place in zip(held, places, strict=True)
            ]
            for one, piece in zip(held, self.pieces, strict=True):
                if self.is_trained:
                    piece.register_post_accumulate_grad_hook(
                        partial(_refuse_piece_gradient, one.name)
                    )
        else:
            self.wholes = [
                _give_memory(one.parameter, view) for one, view in zip(held, views, strict=True)
            ]
            self.pieces = [Parameter(place, requires_grad=self.is_trained) for place in places]
        # Parameters whose memory must stay the one given to them here.
        given_parameters = zip(
            held, *((self.pieces,) if frees else (self.wholes, self.pieces)), strict=True
        )
        self._given_memory = [
            (one.name, p, p.data_ptr())
            for one, *both in given_parameters
            for p in both
            if p.numel()
        ]
        self._nbytes = self._memory.untyped_storage().nbytes()
        self.is_whole = True
        if frees:
            self.release()

    def _copy_values(self) -> None:
        """Copy the parameters' values, if they have memory; they are the same on all workers."""
        pieces = zip(self.layout.piece_ranges(self.rank), self.part_ranges, strict=True)
        for one, (start, stop), (piece, place) in zip(
            self.parameters, self.ranges, pieces, strict=True
        ):
            if one.parameter.is_meta:
                continue
            values = one.parameter.detach().reshape(-1)
            if self.frees:
                self.own_part[slice(*place)].copy_(values[slice(*piece)])
            else:
                self._raw[start:stop].copy_(values)

    @property
    def _exchange_name(self) -> str:
        return f"the parameters of {self.unit or 'the root'}"

    def begin_gather(self, why: str = "") -> Work[list[Tensor]]:
        """Begin to gather the parts of all workers; workers compare `why`."""
        if self.frees and not self.is_whole:
            self._memory.untyped_storage().resize_(self._nbytes)
        own_chunk = self._chunks[self._group.rank]
        if self.frees:
            own_chunk.copy_(self.own_part)
        self._gather_began = time.perf_counter_ns()
        return gather_into(self._group, own_chunk, self._chunks, name=self._exchange_name + why)

    def end_gather(self, work: Work[list[Tensor]]) -> None:
        """Wait until the memory is whole."""
        gathered = self._meter.wait_measured(work, self._exchange_name, self._gather_began)
        # A group that can't write into the chunks returns tensors of its own.
        for rank, (chunk, result) in enumerate(zip(self._chunks, gathered, strict=True)):
            if rank != self.rank and result is not chunk:
                chunk.copy_(result)
        self.is_whole = True
        if self.frees:
            # These are the values that autograd has saved in forward: let it see no change.
            set_version(self._memory, self._version)
            for whole, view in zip(self.wholes, self._views, strict=True):
                whole.data = view

    def gather(self) -> None:
        """Make the memory whole, if it isn't."""
        if not self.is_whole:
            self.check_requires_grad()
            self.end_gather(self.begin_gather())

    def release(self) -> None:
        """Free the memory but for this worker's part."""
        if self.frees:
            if self.is_whole:
                # Until the memory is whole again, let autograd take what it has saved of it for
                # changed. It then raises, and doesn't read freed memory.
                self._version = self._memory._version
                set_version(self._memory, self._version + 1)
                for whole in self.wholes:
                    whole.data = self._no_elements
            self.is_whole = False
            self._memory.untyped_storage().resize_(0)

    def check_requires_grad(self) -> None:
        """Raise `UsageError` if a script has changed `requires_grad`: the layout depends on it."""
        for one, piece in zip(self.parameters, self.pieces, strict=True):
            trained_now = piece.requires_grad if self.frees else one.parameter.requires_grad
            if trained_now != self.is_trained:
                refuse_requires_grad_change(one.name, trained=self.is_trained)

    def check_memory(self) -> None:
        """Raise `UsageError` if a script gave a parameter other memory, or a hook never called."""
        for name, parameter, place in self._given_memory:
            if parameter.data_ptr() != place:
                raise UsageError(
                    f"{name} was moved out of the memory that shard() gave it (it is "
                    f"{parameter.dtype}, and was {self.kept_dtype}), so optimizers don't step it: "
                    "call model.float() and the like before run.prepare, and write values in place "
                    "(p.data.copy_(x)), or by run.whole(p)"
                )
            if self.frees and has_script_hook(parameter):
                refuse_gradient_hook(name)

    def check_gradients(self) -> None:
        """Raise `UsageError` if a script has set the gradient of a whole parameter."""
        for one, whole in zip(self.parameters, self.wholes, strict=True) if not self.frees else ():
            if whole.grad is not None and bool(whole.grad.any()):
                raise UsageError(
                    f"{one.name} was given a gradient by the script (p.grad = ...), and with "
                    "shard(zero=1) or (zero=2) optimizers step by "
                    "those of pieces: let backward make it, or set it in a block of run.whole(p)"
                )

    def show_parameters(self, *, whole: bool) -> None:
        """Put the whole parameters, or the pieces, into the modules that use them.

        Raises `UsageError` if a script has put other parameters there, which would be lost.
        """
        for one, *both in (
            zip(self.parameters, self.wholes, self.pieces, strict=True) if whole else ()
        ):
            for module, name in one.places:
                if all(module._parameters.get(name) is not own for own in both):
                    raise UsageError(
                        f"{one.name} is not the parameter that shard(zero=3) has cut, and would be "
                        "replaced by it "
                        "(functional_call, a new parameter): say zero=2, where functional_call "
                        "takes what it is given, or change values by run.whole(p)"
                    )
        for one, parameter in zip(
            self.parameters, self.wholes if whole else self.pieces, strict=True
        ):
            for module, name in one.places:
                if type(module).__setattr__ is nn.Module.__setattr__:
                    module._parameters[name] = parameter
                # It keeps its parameters elsewhere too, as nn.LSTM does.
                else:
                    setattr(module, name, parameter)


def _refuse_piece_gradient(name: str, _: Tensor) -> NoReturn:
    """Raise `UsageError` for a gradient of a piece: only those of whole parameters are summed."""
    raise UsageError(
        f"the loss uses {name} itself, and each worker has a piece of it while its unit isn't "
        "running (shard(zero=3)), so losses would "
        "differ: say zero=2, where parameters are whole, or let the optimizer do a penalty "
        "(weight_decay)"
    )


def has_script_hook(piece: Parameter) -> bool:
    """Whether a script has registered a hook for the gradient of a piece, besides paceline's."""
    # Both attributes are private to torch: dicts of hooks by handle, or None. `func` unwraps a
    # partial.
    hooks = [
        getattr(hook, "func", hook) for hook in (piece._post_accumulate_grad_hooks or {}).values()
    ]
    homes = [getattr(hook, "__module__", None) or "" for hook in hooks]
    return bool(piece._backward_hooks) or not all(home.startswith("paceline.") for home in homes)


def refuse_gradient_hook(name: str) -> NoReturn:
    """Raise `UsageError` for a hook on the gradient of a piece."""
    raise UsageError(
        f"{name} has a gradient hook of the script, which would never be called, as zero=3 makes a "
        "new whole parameter "
        "each time; remove the hook, or say zero=2, where it gets this worker's gradient"
    )


def refuse_requires_grad_change(name: str, *, trained: bool) -> NoReturn:
    """Raise `UsageError` for a parameter that was frozen or unfrozen after the cut."""
    raise UsageError(
        f"{name} was {'trained' if trained else 'frozen'} when the model was cut by shard(), and "
        f"is {'frozen' if trained else 'trained'} now; set requires_grad before run.prepare"
    )


def _give_memory(parameter: Parameter, memory: Tensor) -> Parameter:
    """Give a parameter other memory. It stays the same object."""
    if parameter.is_meta:  # `set_` can't change its device
        torch.utils.swap_tensors(
            parameter, Parameter(memory, requires_grad=parameter.requires_grad)
        )
    else:
        with torch.no_grad():
            parameter.set_(memory)  # type: ignore[call-overload]
    return parameter
