"""Parameters that are still on their way from servers: the first use of one waits for it.

    step       close | ask for units 2, 1, 0                    parameters are `PendingParameter` now, in the order of forward
    forward    p0 ............ p1 ............. p2 ....         the first use of each takes in its units: it is a plain one again
    pull       -- unit 2 --|-- unit 1 --|-- unit 0 --|
    backward   what has not been used is taken in before the first push

While it is awaited, a parameter has a class of its own, which torch asks before it does anything with the parameter
(`__torch_function__`), whatever uses it, by whatever name: its module, a module that borrows it, state_dict, a copy, the user's own lines.
Calls that need no values (p.grad, p.shape) go on at once. Nothing is written into a parameter that has been used since the step, so
graphs stay valid.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes

from paceline.errors import DeadlineExceeded, PacelineError, UsageError
from paceline.server.protocol.message import SentRequest
from paceline.server.protocol.parameters import UnitValues
from paceline.sync.base import Slot
from paceline.sync.context import SyncContext
from paceline.sync.parameterserver.compression import PushPullCodec
from paceline.sync.parameterserver.connections import ReplicaConnections
from paceline.sync.parameterserver.units import TransferUnit, version

_COMING = "_paceline_coming"  # the attribute by which an awaited parameter is taken in
_READ = ("requires_grad", "shape", "dtype", "device", "is_leaf", "grad_fn", "ndim", "layout", "is_sparse", "is_cuda")
_ASKED = ("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex")
_GRAD: Any = Tensor.grad
VALUELESS = {  # what can be done with a parameter without its values
    *(_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__),
    *(getattr(Tensor, name).__get__ for name in _READ),
    *(getattr(Tensor, name) for name in _ASKED),
}


class PendingParameter(nn.Parameter):
    """A parameter that is on its way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VALUELESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for parameter in awaited((args, kwargs)):
            land(parameter)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        land(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        land(self)
        return self.__reduce_ex__(protocol)


def awaited(found: Any) -> list[PendingParameter]:
    """Return the pending parameters among the arguments of a call."""
    if type(found) is PendingParameter:
        return [found]
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ()
    return [parameter for part in parts for parameter in awaited(part)]


def land(parameter: PendingParameter) -> None:
    """Wait for a parameter."""
    coming: PendingPulls | None = vars(parameter).get(_COMING)
    if coming is not None:
        coming.land(parameter)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Let torch compute plainly inside of the block, whatever surrounds a forward: transformations, modes, inference."""
    outside = torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(), _disable_current_modes()
    with outside[0], outside[1], outside[2], torch.inference_mode(False), torch.no_grad():
        yield


Asked = tuple[TransferUnit, SentRequest[UnitValues]]  # a unit, and the request for its parameters


class PendingPull(NamedTuple):
    """A unit that was asked for, and has not been taken in."""

    unit: TransferUnit
    sent: SentRequest[UnitValues]
    slots: frozenset[int]


class PendingPulls:
    """Units that one worker has asked for and not taken in yet. Any thread may use it."""

    def __init__(self, context: SyncContext, connections: ReplicaConnections, codec: PushPullCodec) -> None:
        self._context, self._connections, self._codec = context, connections, codec
        self._slots: list[Slot] = []
        self._lock = threading.RLock()
        self._home = os.getpid()
        self._able: list[bool] = []  # by slot: whether its parameter can be awaited
        self._pulls: dict[tuple[int, int], PendingPull] = {}  # by server and unit, in the order in which they were asked for
        self._units: dict[int, set[tuple[int, int]]] = {}  # by slot: its units that are still to come
        self._grads: dict[int, tuple[Tensor | None, int]] = {}  # what p.grad was when the parameter began to be awaited
        self._numbers: dict[int, int] = {}  # slots, by id of their parameters
        self._needed: float | None = None  # when the first step began whose parameters are awaited
        self._shown = 0.0  # seconds that steps since, and what awaits their parameters, have taken

    def regroup(self, context: SyncContext) -> None:
        """Go on in this context."""
        self._context = context

    def lay_out(self, slots: Sequence[Slot]) -> None:
        """Await the parameters of these slots from now on."""
        self._slots = list(slots)
        self._numbers = {id(slot.parameter): number for number, slot in enumerate(slots)}
        homes = [slot.parameter.untyped_storage().data_ptr() for slot in slots]
        shared = Counter(homes)
        self._able = [_able(slot) and shared[home] == 1 for slot, home in zip(slots, homes, strict=True)]

    # ---- what comes

    def expect(self, pulls: Iterable[Asked]) -> list[Asked]:
        """Await these units that were asked for; return those that can't be awaited and have to be taken in at once."""
        rest, new = list[Asked](), set[int]()
        for unit, sent in pulls:
            slots = frozenset(piece.slot for piece, _ in unit.members)
            if not all(self._able[slot] for slot in slots):
                rest.append((unit, sent))
                continue
            key = unit.server, unit.number
            assert key not in self._pulls, "a unit is asked for once what was asked for before has come"
            self._pulls[key] = PendingPull(unit, sent, slots)
            for slot in slots:
                self._units.setdefault(slot, set()).add(key)
            new |= slots
        for slot in new:
            parameter = self._slots[slot].parameter
            self._grads[slot] = parameter.grad, version(parameter.grad)
            increment_version(parameter)  # graphs that used its old values are invalid, as after any step
            setattr(parameter, _COMING, self)
            parameter.__class__ = PendingParameter
        return rest

    def land(self, parameter: Tensor) -> None:
        """Take in this parameter, which is being used."""
        if os.getpid() != self._home:
            raise UsageError(
                "a parameter that was on its way from a server when this process was forked is used in it: let the process that trains "
                "read it before (p.detach()), or say ParameterServer(pull='step')"
            )
        with self._lock:
            for key in sorted(self._units.get(self._numbers[id(parameter)], ()), reverse=True):
                self._take(key, self._context.deadline)

    def use(self, parameters: Collection[Any] | None = None) -> None:
        """Take in these parameters (None: all), which are about to be used where torch doesn't ask for them."""
        if self._pulls:
            for parameter in awaited([slot.parameter for slot in self._slots] if parameters is None else list(parameters)):
                land(parameter)

    def arrive(self, optimizer: int | None = None) -> None:
        """Take in all that is on its way (to parameters of one optimizer)."""
        with self._lock:
            for key, pull in list(self._pulls.items()):
                if optimizer is None or pull.unit.optimizer == optimizer:
                    self._take(key, self._context.deadline)

    def check(self, optimizer: int) -> None:
        """Raise `UsageError` where p.grad was computed with a parameter that had not arrived."""
        for slot in {slot for pull in list(self._pulls.values()) if pull.unit.optimizer == optimizer for slot in pull.slots}:
            name, parameter = self._slots[slot].name, self._slots[slot].parameter
            if _new(parameter.grad, *self._grads[slot]):
                raise UsageError(
                    f"{name} has a gradient, and was still on its way from its server when that was made: it was used where torch doesn't "
                    "ask it (torch.func on bare parameters, a C++ extension). Take it by p.detach() there, or say "
                    "ParameterServer(pull='step')"
                )

    def _take(self, key: tuple[int, int], seconds: float) -> None:
        context, pull, began = self._context, self._pulls[key], time.perf_counter()
        try:
            answer = context.agreement.wait(lambda: pull.sent.wait(seconds), "the parameters")
        except DeadlineExceeded as error:
            names = ", ".join(sorted(self._slots[slot].name for slot in pull.slots))
            raise DeadlineExceeded(f"{error}, and {names} is on its way from there", error.missing) from error
        with plainly():
            pull.unit.give(self._slots, self._codec.decode(pull.unit, answer))
        del self._pulls[key]
        for slot in pull.slots:
            self._units[slot].discard(key)
            if not self._units[slot]:
                self._free(slot)
        ended = time.perf_counter()
        context.pulling += ended - began
        self._shown += ended - began
        context.trace.record("parameters", "exchange", int(began * 1e9), int(ended * 1e9))
        self._conclude()

    def _free(self, slot: int) -> None:
        """Make it a plain parameter again."""
        parameter = self._slots[slot].parameter
        del self._units[slot], self._grads[slot]
        parameter.__class__ = nn.Parameter
        delattr(parameter, _COMING)

    # ---- steps, and the end

    def step(self, optimizer: int, act: Callable[[int], None]) -> None:
        """Make a step of an optimizer by `act`, once what its last step asked for has arrived."""
        context = self._context
        pulling = context.pulling
        self.check(optimizer)
        self.arrive(optimizer)
        began = time.perf_counter()
        act(optimizer)
        context.pulling = pulling  # the caller of the step counts its time
        self._needed = began if self._needed is None else self._needed
        self._shown += time.perf_counter() - began
        self._conclude()

    def _conclude(self) -> None:
        """Count how long the steps were waited for, once all has arrived."""
        if self._needed is not None and not self._pulls:
            self._codec.waited(self._needed, self._shown, len(self._connections.primaries))
            self._needed, self._shown = None, 0.0

    def end(self) -> None:
        """Make all parameters plain as the run ends on this worker, after a short wait for what can still arrive."""
        with self._lock:
            until = time.monotonic() + self._context.timings.servers.last_pull
            with contextlib.suppress(PacelineError):
                for key in list(self._pulls):
                    self._take(key, max(until - time.monotonic(), 0.0))
            if self._units:
                names = ", ".join(sorted(self._slots[slot].name for slot in self._units))
                self._context.announce(f"what the last step made of {names} has not come: there are older values in the model")
            self._pulls.clear()
            for slot in list(self._units):
                self._free(slot)


def _new(grad: Tensor | None, before: Tensor | None, as_of: int) -> bool:
    """Whether a gradient has come since p.grad was `before`, of that version: zeros and copies are none."""
    if grad is None or (grad is before and version(grad) == as_of):
        return False
    copied = before is not None and grad is not before and version(before) == as_of and torch.equal(grad, before)
    return not copied and bool(grad.any())


def _able(slot: Slot) -> bool:
    """Whether torch asks this parameter at each use: not if it is used in a scripted module, or lies in shared memory."""
    parameter = slot.parameter
    storage = parameter.untyped_storage()
    return (
        type(parameter) is nn.Parameter
        and not slot.scripted
        and not storage.is_shared()
        and storage.nbytes() == parameter.numel() * parameter.element_size()
    )
