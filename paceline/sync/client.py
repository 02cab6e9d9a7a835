"""The parameter server, seen from a worker: gradients go to servers while backward runs, steps are taken there, parameters come back.

    backward   g9 g8 | g7 g6 ... | g1 g0 |
    push            ---- unit 0 ---- unit 1 ----     to the server that keeps it, as soon as a unit is complete
    step                                       close | read unit 0, unit 1, ... -> parameters

What counts is p.grad when the optimizer steps: what was changed after it had been pushed is pushed again, in place of the first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.cluster.snapshot import loads, pack
from paceline.comm.buckets import Shape, build, cut
from paceline.comm.group import Traffic
from paceline.comm.messages import Caller
from paceline.errors import PacelineError, UsageError, WorkerLost
from paceline.sync import recipe
from paceline.sync.base import Room, Scene, Slot, Sync
from paceline.sync.pieces import Piece, deal, pieces
from paceline.sync.server import write
from paceline.sync.shard import Plan
from paceline.wording import spell


@dataclass(frozen=True)
class ParameterServer:
    """Optimizers step on servers, each of which keeps a part of the parameters; all workers take the same step at the same time (BSP).

    p.grad is the gradient of my own share when backward returns. optimizer.step sends what p.grad is then, weighted by my samples, has the
    servers step with the sum of all workers, and sets the parameters to what came of it; what optimizers remember lies on servers alone.
    Clip with `run.clip`, which knows the gradients of all. `servers`: how many (None: one on each host).
    """

    servers: int | None = None
    bucket_mb: float = 4.0

    __repr__ = spell

    def __post_init__(self) -> None:
        if self.servers is not None and self.servers < 1:
            raise UsageError(f"servers={self.servers} is no number of servers; give 1 or more, or leave it out for one on each host")
        if not self.bucket_mb > 0:
            raise UsageError(f"bucket_mb={self.bucket_mb} is not a size; give megabytes above 0, e.g. bucket_mb=4")

    def begin(self, scene: Scene) -> Sync:
        """See `Strategy.begin`."""
        return Client(scene, self)


@dataclass
class Parcel:
    """A unit of a server, as this worker has it: the memory that travels, and the parts of parameters in it."""

    server: int
    number: int  # on that server
    optimizer: int
    flat: Tensor
    members: list[tuple[Piece, Tensor]]  # and where each lies
    sent: int | None = None  # the message that waits to be acknowledged
    pushed: dict[int, tuple[Tensor | None, int]] = field(
        default_factory=dict
    )  # of this step: which gradients, by slot, as of which version


class Wires:
    """What goes to servers, as a part of what the worker sends (`Sending`)."""

    def __init__(self) -> None:
        self.waited = 0.0  # seconds, for workers that closed a step later
        self.callers: list[Caller] = []
        self._past = Traffic()

    @property
    def traffic(self) -> Traffic:
        """See `Sending`."""
        within = sum(caller.nbytes for caller in self.callers if caller.near)
        return self._past + Traffic(within, sum(caller.nbytes for caller in self.callers) - within)

    def close(self) -> None:
        """See `Sending`."""
        self._past, callers, self.callers = self.traffic, self.callers, []
        for caller in callers:
            caller.close()

    def abort(self) -> None:
        """See `Sending`."""
        self.end(WorkerLost("this worker leaves"))

    def end(self, error: PacelineError) -> None:
        """Nothing can be waited for any more. From any thread."""
        for caller in self.callers:
            caller.end(error)


class Client:
    """The running side of `ParameterServer`."""

    apart = False
    meets = True
    together = False  # backward waits for nobody

    def __init__(self, scene: Scene, plan: ParameterServer) -> None:
        if scene.servers is None:
            raise UsageError("ParameterServer needs servers, and nobody starts any here: start the workers with `paceline run`")
        self._scene, self._spec = scene, plan
        self._room: Room | None = None
        self._wires = Wires()
        scene.sides.append(self._wires)
        self._slots: list[Slot] = []
        self._optimizers: list[Optimizer] = []
        self._told: list[recipe.Settings] = []
        self._steps: list[int] = []
        self._factors: dict[int, float] = {}  # of optimizers whose next step is clipped
        self._plans: list[Plan] = []
        self._parcels: list[Parcel] = []
        self._of: dict[int, list[Parcel]] = {}  # by slot
        self._grads: dict[int, Tensor] = {}
        self._part = 0.0
        self._workers = list(range(scene.group.size))

    @property
    def _callers(self) -> list[Caller]:
        return self._wires.callers

    @property
    def _seconds(self) -> float:
        return self._scene.deadline

    # ---- what lies where

    def attach(self, slots: Sequence[Slot]) -> None:
        """See `Sync.attach`."""
        if self._steps and any(self._steps):
            raise UsageError(
                "parameters that were frozen are trained now, and servers can't take in more of them once they have stepped: let all of "
                "them require gradients when they are prepared, or use AllReduce"
            )
        if any(slot.parameter.device.type != "cpu" for slot in slots):
            raise UsageError("ParameterServer can't serve models on GPUs yet; say start(device='cpu'), or use another strategy")
        self._slots = [slot for slot in slots if slot.optimizer is not None]
        self._optimizers = list({id(slot.optimizer): slot.optimizer for slot in self._slots if slot.optimizer is not None}.values())
        self._told = [recipe.settings(optimizer) for optimizer in self._optimizers]
        self._steps = [0] * len(self._optimizers)
        for caller in self._callers if self._scene.group.rank == 0 else ():
            caller.call("end", seconds=self._seconds)
        self._wires.close()
        assert self._scene.servers is not None
        room = self._room = self._scene.servers(self._spec.servers)
        me = self._workers[self._scene.group.rank]
        self._wires.callers = [
            Caller(address, room.keys, sender=me, who=name) for address, name in zip(room.addresses, room.names, strict=True)
        ]
        room.watch(self._wires.end)
        self._plans = self._plan(len(self._callers))
        for caller, plan in zip(self._callers, self._plans, strict=True):
            packed = torch.frombuffer(bytearray(write(plan)), dtype=torch.uint8)
            caller.call("plan", tensors=[packed], seconds=self._seconds)
        self._hand_over(None)

    def _hand_over(self, memories: Sequence[Mapping[str, Any]] | None) -> None:
        """Servers begin with the first worker's parameters, and with `memories` (None: what its optimizers remember). Collective."""
        mine = [slot.optimizer.state.pop(slot.parameter, {}) for slot in self._slots if slot.optimizer is not None]
        if self._callers and self._scene.group.rank == 0:
            self._fill(mine if memories is None else memories)
        self._scene.agreement.meet("servers")

    def _plan(self, servers: int) -> list[Plan]:
        """What each server keeps; the parcels of this worker are laid out as their units are."""
        shapes = [Shape.of(slot.parameter) for slot in self._slots]
        owners = [self._owner(slot) for slot in self._slots]
        names = [recipe.describe(optimizer) for optimizer in self._optimizers]
        found = pieces(shapes, servers, [names[optimizer] in recipe.WHOLE for optimizer, _ in owners])
        plans, self._parcels, self._of = [], [], {}
        for server, numbers in enumerate(deal(found, servers)):
            mine = [found[number] for number in numbers]
            kinds = [piece.shape._replace(kind=owners[piece.slot][0]) for piece in mine]
            runs = cut(kinds, reversed(range(len(mine))), int(self._spec.bucket_mb * 1e6))
            plan = Plan(mine, runs, [owners[piece.slot] for piece in mine], list(zip(names, self._told, strict=True)))
            plans.append(plan)
            plain = [piece.shape for piece in mine]
            for number, (run, bucket) in enumerate(zip(runs, build(plain, runs, _empty), strict=True)):
                members = [(mine[piece], view) for piece, view in zip(run, bucket.views, strict=True)]
                parcel = Parcel(server, number, plan.owners[run[0]][0], bucket.flat, members)
                self._parcels.append(parcel)
                for slot in {piece.slot for piece, _ in members}:
                    self._of.setdefault(slot, []).append(parcel)
        return plans

    def _owner(self, slot: Slot) -> tuple[int, int]:
        for number, optimizer in enumerate(self._optimizers):
            for group, values in enumerate(optimizer.param_groups):
                if any(parameter is slot.parameter for parameter in values["params"]):
                    return number, group
        raise AssertionError(f"{slot.name} is in no group of its optimizer")

    def _fill(self, memories: Sequence[Mapping[str, Any]]) -> None:
        """Servers begin with my parameters, and with what optimizers remember of them."""
        for parcel in self._parcels:
            for piece, view in parcel.members:
                view.copy_(_rows(self._slots[piece.slot].parameter.detach(), piece))
            self._call(parcel.server, "fill", {"unit": parcel.number}, [parcel.flat])
        for server, plan in enumerate(self._plans):
            found = [_cut(memories[piece.slot], piece, self._slots[piece.slot].parameter) for piece in plan.pieces]
            packed = torch.frombuffer(bytearray(pack({"memories": found}).dumps()), dtype=torch.uint8)
            self._call(server, "remember", {}, [packed])

    def _call(self, server: int, kind: str, body: dict[str, Any], tensors: Sequence[Tensor] = ()) -> Any:
        return self._callers[server].call(kind, body=body, tensors=tensors, seconds=self._seconds)

    # ---- backward: what is complete leaves

    def ready(self, number: int, grad: Tensor, scale: float) -> None:
        """See `Sync.ready`."""
        self._part = self._scene.moment.part
        factor = scale / self._part if self._part else 0.0
        value = torch.zeros_like(grad) if factor == 0.0 else grad if factor == 1.0 else grad * factor
        self._grads[number] = self._grads[number] + value if number in self._grads else value
        for parcel in self._of.get(number, ()):
            if not parcel.pushed and all(piece.slot in self._grads for piece, _ in parcel.members):
                self._push(parcel, {piece.slot: self._grads[piece.slot] for piece, _ in parcel.members})

    def backward_done(self, where: str) -> list[tuple[int, Tensor]]:
        """See `Sync.backward_done`."""
        self._part = self._scene.moment.part
        found, self._grads = list(self._grads.items()), {}
        return found

    def _push(self, parcel: Parcel, grads: Mapping[int, Tensor | None]) -> None:
        """These gradients, weighted, to the server; in place of what was pushed before."""
        self._await([parcel])  # its memory may be on its way still
        used = bytearray()
        for piece, view in parcel.members:
            grad = grads[piece.slot]
            if grad is not None and grad.is_sparse:
                raise UsageError(
                    f"the gradient of {self._slots[piece.slot].name} is sparse, and ParameterServer takes dense ones: leave out sparse=True"
                )
            used.append(grad is not None)
            if grad is None or not self._part:
                view.zero_()
            else:
                torch.mul(_rows(grad, piece), self._part, out=view)
        parcel.pushed = {slot: (grad, _version(grad)) for slot, grad in grads.items()}
        body = {"unit": parcel.number, "used": bytes(used)}
        parcel.sent = self._callers[parcel.server].send("push", body=body, tensors=[parcel.flat], seconds=self._seconds)

    def _await(self, parcels: Sequence[Parcel]) -> None:
        """What was pushed of them has arrived."""
        for parcel in parcels:
            if parcel.sent is not None:
                message, parcel.sent = parcel.sent, None
                self._callers[parcel.server].wait(message, self._seconds)

    def _settle(self, optimizer: int) -> list[Parcel]:
        """All that p.grad is now has arrived: what was changed since it was pushed is pushed again."""
        parcels = [parcel for parcel in self._parcels if parcel.optimizer == optimizer]
        for parcel in parcels:
            grads = {piece.slot: self._slots[piece.slot].parameter.grad for piece, _ in parcel.members}
            pushed = parcel.pushed
            if not pushed or any(grad is not pushed[slot][0] or _version(grad) != pushed[slot][1] for slot, grad in grads.items()):
                if optimizer in self._factors:
                    raise UsageError(
                        "p.grad was changed after run.clip, when servers have the sum of all workers already: change it before that"
                    )
                self._push(parcel, grads)
        self._await(parcels)
        return parcels

    # ---- a step

    @property
    def attached(self) -> bool:
        """See `Steps.attached`."""
        return bool(self._slots)

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer steps on servers."""
        return any(known is optimizer for known in self._optimizers)

    def step(self, optimizer: Optimizer) -> None:
        """Instead of the optimizer's own step: see `ParameterServer`."""
        number = next(n for n, known in enumerate(self._optimizers) if known is optimizer)
        parcels = self._settle(number)
        now, step = recipe.settings(optimizer), self._steps[number] + 1
        changes = [[group, values] for group, values in recipe.changed(self._told[number], now).items()]
        factor = self._factors.pop(number, 1.0)
        body = {"optimizer": number, "step": step, "workers": self._workers, "factor": factor, "settings": changes}
        closes = [caller.send("close", step=step, body=body, seconds=self._seconds) for caller in self._callers]
        reads = [
            self._callers[parcel.server].send("read", step=step, body={"unit": parcel.number, "step": step}, seconds=self._seconds)
            for parcel in parcels
        ]
        began = time.perf_counter()
        for caller, message in zip(self._callers, closes, strict=True):
            caller.wait(message, self._seconds)
        self._wires.waited += time.perf_counter() - began
        for parcel, message in zip(parcels, reads, strict=True):
            self._take(parcel, self._callers[parcel.server].wait(message, self._seconds).tensors[0])
            parcel.pushed = {}
        self._told[number], self._steps[number] = now, step

    def _take(self, parcel: Parcel, flat: Tensor) -> None:
        """Parameters as they are on the server now."""
        start = parcel.flat.storage_offset()
        for piece, view in parcel.members:
            values = flat.as_strided(view.size(), view.stride(), view.storage_offset() - start)
            _rows(self._slots[piece.slot].parameter.detach(), piece).copy_(values)

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Let the next steps be clipped by the norm of the gradients of all workers; gives it."""
        mine = {id(parameter) for parameter in parameters}
        numbers = sorted(
            {parcel.optimizer for parcel in self._parcels for piece, _ in parcel.members if id(self._slots[piece.slot].parameter) in mine}
        )
        covered = [id(slot.parameter) for slot in self._slots if self._owner(slot)[0] in numbers]
        if not numbers or not {*covered} <= mine:
            raise UsageError(
                "with ParameterServer run.clip takes all parameters of an optimizer together, as only servers have the gradients of all "
                "workers: give it the model that the optimizer was made for"
            )
        for number in numbers:
            self._settle(number)
        kind, norms = None if norm_type == math.inf else norm_type, []
        for number in numbers:
            body = {"optimizer": number, "step": self._steps[number] + 1, "workers": self._workers, "kind": kind}
            sent = [caller.send("norm", body=body, seconds=self._seconds) for caller in self._callers]
            norms += [float(caller.wait(message, self._seconds).body["norm"]) for caller, message in zip(self._callers, sent, strict=True)]
        total = float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))
        for number in numbers:
            self._factors[number] = min(1.0, max_norm / (total + 1e-6))
        return torch.tensor(total)

    def stepped(self, optimizer: Optimizer) -> None:
        """See `Sync.stepped`."""

    def commit(self) -> None:
        """See `Sync.commit`: all workers have taken the same steps, and read the same."""

    # ---- the rest of the life of a strategy

    def abort(self) -> None:
        """See `Sync.abort`."""
        self._grads.clear()

    def mirrored(self) -> dict[str, Tensor] | None:
        """See `Sync.mirrored`: all workers read the same parameters after each step."""
        return {}

    def converge(self) -> None:
        """See `Sync.converge`: they are equal always."""

    def layout(self) -> Any:
        """See `Sync.layout`."""
        return {}

    def regroup(self, scene: Scene, layout: Any = None) -> None:
        """See `Sync.regroup`."""
        raise WorkerLost("a worker was lost, and ParameterServer can't go on without it: resume from a checkpoint")

    def inherit(self, state: dict[str, Any]) -> None:
        """See `Sync.inherit`."""
        raise AssertionError("nobody comes where regroup raises")

    @property
    def owns(self) -> bool:
        """See `Sync.owns`: what optimizers remember lies on servers."""
        return False

    def own(self) -> dict[str, Any] | None:
        """See `Sync.own`."""
        return None

    def take_over(self, state: dict[str, Any], step: int) -> bool:
        """See `Sync.take_over`."""
        return False

    def detach(self) -> None:
        """See `Sync.detach`."""
        self._wires.close()
        if self._room is not None:
            self._room.close()

    def state_dict(self) -> dict[str, Any]:
        """See `Sync.state_dict`: what optimizers on servers remember of each parameter, on the first worker."""
        if not self._callers or self._scene.group.rank:
            return {"memories": None}
        found: list[list[tuple[Piece, dict[str, Any]]]] = [[] for _ in self._slots]
        for server, plan in enumerate(self._plans):
            packed = self._call(server, "memories", {}).tensors[0]
            for piece, memory in zip(plan.pieces, loads(packed.numpy().tobytes()).unpack()["memories"], strict=True):
                found[piece.slot].append((piece, memory))
        return {"memories": [_whole(parts) for parts in found]}

    def adopt(self, states: Sequence[dict[str, Any]]) -> None:
        """See `Sync.adopt`: servers go on from the parameters that are here, and what was saved."""
        found = [state for state in states if state]
        if any("memories" not in state for state in found):
            raise UsageError("this checkpoint was written with another kind of strategy than ParameterServer; resume with that one")
        memories = next((state["memories"] for state in found if state["memories"] is not None), None)
        if memories is not None and len(memories) != len(self._slots):
            raise UsageError(f"this checkpoint is of a model of {len(memories)} parameters, and here are {len(self._slots)}")
        self._hand_over(memories)


def _empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype)


def _rows(x: Tensor, piece: Piece) -> Tensor:
    return x if piece.whole else x[piece.start : piece.stop]


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version


def _cut(memory: Mapping[str, Any], piece: Piece, parameter: Tensor) -> dict[str, Any]:
    """What an optimizer remembers of some rows, from what it remembers of all."""
    return {
        name: _rows(value, piece).contiguous() if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for name, value in memory.items()
    }


def _whole(parts: Sequence[tuple[Piece, Mapping[str, Any]]]) -> dict[str, Any]:
    """What is remembered of a parameter, from what is remembered of its pieces."""
    first, memory = parts[0]
    if first.whole:
        return dict(memory)
    ordered = [part for _, part in sorted(parts, key=lambda part: part[0].start)]
    rows = {name for name, value in memory.items() if isinstance(value, Tensor) and value.shape == first.shape.size}
    return {name: torch.cat([part[name] for part in ordered]) if name in rows else value for name, value in memory.items()}
