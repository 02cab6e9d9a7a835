"""Answers the messages of workers on the parameters of a shard.

`protocol.parameters` and `protocol.recovery` define the messages. If a request can't be answered
yet, its handler returns None, and the server tries again later. Nothing here waits for one worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.errors import UsageError
from paceline.servers.process.shard import Shard
from paceline.servers.protocol import parameters, plans, recovery
from paceline.servers.protocol.message import Acknowledged, Handlers
from paceline.servers.protocol.parameters import Changes
from paceline.servers.protocol.samples import MissingWorkers
from paceline.state.snapshot import byte_tensor, loads, pack

# Number of steps whose norms are remembered.
KEPT = 8
# Largest number of bytes of a shard that travel as one tensor.
CHUNK = 1 << 28


def _in_one_turn(optimizer: int, step: int, turns: Mapping[int, int]) -> None:
    """Raise `UsageError` if workers make a step in different turns: some have skipped a step."""
    if len({*turns.values()}) > 1:
        sides = ", ".join(
            f"rank {worker} after {turn} steps of training" for worker, turn in turns.items()
        )
        raise UsageError(
            f"replicas part: step {step} of optimizer {optimizer} is made by {sides}; "
            "a worker has skipped a step. Skip a step on all workers or on none: decide by a value "
            "that is the same on all of them, such as run.mean(loss)"
        )


def _differ(optimizer: int, step: int, *sides: tuple[float, Changes]) -> UsageError:
    """Make the error for workers that close a step with different factors or settings."""
    described = [(factor, [list(change) for change in settings]) for factor, settings in sides]
    return UsageError(
        f"workers take step {step} of optimizer {optimizer} with different settings, or clipped "
        f"differently: {described}"
    )


class ShardRpc:
    """Answers messages on parameters.

    `handlers` maps each request to the method that handles it. If that returns None, the reply has
    to wait.
    """

    def __init__(self) -> None:
        self._shard: Shard | None = None
        self._digest = b""
        # By optimizer and step: the requests of the workers that have closed it so far.
        self._closing: dict[tuple[int, int], dict[int, parameters.CloseStep]] = {}
        # By optimizer and step: the workers that have asked for its norm so far.
        self._asking: dict[tuple[int, int], set[int]] = {}
        # By optimizer: the request that made its last step, if one worker's request is enough.
        self._made: dict[int, parameters.CloseStep] = {}
        # By optimizer and step, then by the order of the norm.
        self._norms: dict[tuple[int, int], dict[float, float]] = {}
        self.handlers: Handlers = {
            parameters.PlanShard: self._plan,
            parameters.FillUnit: self._fill,
            parameters.LoadMemories: self._load_memories,
            parameters.ReadMemories: self._read_memories,
            parameters.PushGradient: self._push,
            parameters.ReadNorm: self._norm,
            parameters.CloseStep: self._close,
            parameters.AwaitStep: self._await,
            parameters.ApplyGradient: self._apply,
            parameters.ListAbsent: self._list_absent,
            parameters.PullUnit: self._pull,
            recovery.RollBackSteps: self._roll_back,
            recovery.SkipStep: self._skip,
            recovery.DiscardPushes: self._discard,
            recovery.ReadShard: self._read_shard,
            recovery.LoadShard: self._load_shard,
        }

    @property
    def begun(self) -> bool:
        """Whether a worker has sent the plan of the shard."""
        return self._shard is not None

    @property
    def shard(self) -> Shard:
        """The shard that the server keeps."""
        assert self._shard is not None
        return self._shard

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return 0 if self._shard is None else self._shard.nbytes

    # ---- the beginning

    def _plan(self, worker: int, request: parameters.PlanShard) -> Acknowledged:
        packed = request.plan.numpy().tobytes()
        digest = hashlib.sha256(packed).digest()
        if self._shard is None:
            self._shard, self._digest = Shard(plans.read(packed)), digest
        elif digest != self._digest:
            raise UsageError("another plan is in use here: workers have prepared different things")
        return Acknowledged()

    def _fill(self, worker: int, request: parameters.FillUnit) -> Acknowledged:
        self.shard.fill(request.unit, request.values)
        return Acknowledged()

    def _load_memories(self, worker: int, request: parameters.LoadMemories) -> Acknowledged:
        self.shard.remember(loads(request.packed.numpy().tobytes()).unpack()["memories"])
        return Acknowledged()

    def _read_memories(
        self, worker: int, request: parameters.ReadMemories
    ) -> parameters.OptimizerMemories:
        return parameters.OptimizerMemories(
            byte_tensor(pack({"memories": self.shard.memories()}, copy=False).dumps())
        )

    # ---- steps

    def _push(self, worker: int, request: parameters.PushGradient) -> Acknowledged:
        # A gradient that is too late for its step is acknowledged, and left out.
        if not request.drop_late or self.shard.in_time(request.unit, request.step):
            self.shard.push(
                request.unit,
                worker,
                request.gradient,
                request.used,
                keep=request.keep,
                turn=request.turn,
            )
        return Acknowledged()

    def _apply(self, worker: int, request: parameters.ApplyGradient) -> Acknowledged:
        factor, part, settings = request.factor, request.part, dict(request.settings)
        self.shard.apply(
            request.optimizer, worker, request.step, factor=factor, part=part, settings=settings
        )
        return Acknowledged()

    def _norm(self, worker: int, request: parameters.ReadNorm) -> parameters.Norm | None:
        shard, key = self.shard, (request.optimizer, request.step)
        steps_made = shard.steps[request.optimizer]
        if not request.decided:
            self._check_next(*key)
            askers = self._asking.setdefault(key, set())
            askers.add(worker)
            if not askers.issuperset(request.workers):
                # A worker that hasn't asked yet may still replace its push. The norm computes the
                # sum, so it has to wait for all of them.
                return None
        elif request.step > steps_made + 1:
            # The step before was decided, too, but its request has not come yet.
            return None
        elif request.step <= steps_made and key not in self._norms:
            raise UsageError(
                f"step {request.step} of optimizer {request.optimizer} has been made, and its norm "
                "is not known here"
            )
        # The norm is remembered, because another worker may have closed the step meanwhile.
        norm = self._norms.setdefault(key, {}).get(request.norm_type)
        if norm is None:
            norm = self._norms[key][request.norm_type] = shard.norm(
                request.optimizer, request.workers, request.norm_type
            )
        self._norms.pop((request.optimizer, request.step - KEPT), None)
        return parameters.Norm(norm)

    def _check_next(self, optimizer: int, step: int) -> None:
        if step != self.shard.steps[optimizer] + 1:
            raise UsageError(
                f"step {step} of optimizer {optimizer} can't come after step "
                f"{self.shard.steps[optimizer]}"
            )

    def _close(self, worker: int, request: parameters.CloseStep) -> Acknowledged | None:
        key = optimizer, step = request.optimizer, request.step
        steps_made = self.shard.steps[optimizer]
        # The request comes again, or another worker's request has made the step.
        if step <= steps_made:
            self._check_same(request)
            return Acknowledged()
        if request.decided and step > steps_made + 1:
            # The step before was decided, too, but its request has not come yet.
            return None
        self._check_next(optimizer, step)
        if request.decided:
            self._make(request)
            self._made[optimizer] = request
            return Acknowledged()
        # In lockstep, the step is made when all workers have closed it in the same way.
        requests = self._closing.setdefault(key, {})
        requests[worker] = request
        if any(other not in requests for other in request.workers):
            return None
        _in_one_turn(optimizer, step, {other: requests[other].turn for other in request.workers})
        sides = [(requests[other].factor, requests[other].settings) for other in request.workers]
        if any(side != sides[0] for side in sides):
            raise _differ(optimizer, step, *sides)
        self._make(request)
        del self._closing[key]
        self._asking.pop(key, None)
        return Acknowledged()

    def _make(self, request: parameters.CloseStep) -> None:
        how: dict[str, Any] = {"part": request.part, "keep": request.keep, "undo": request.undo}
        self.shard.close(
            request.optimizer,
            request.step,
            request.workers,
            factor=request.factor,
            settings=dict(request.settings),
            **how,
        )

    def _check_same(self, request: parameters.CloseStep) -> None:
        """Raise `UsageError` if a step that has been made is closed in another way.

        Only for steps that all workers have to close in the same way.
        """
        earlier = self._made.get(request.optimizer, request)
        sides = [(close.factor, close.settings) for close in (earlier, request)]
        if request.same and earlier.step == request.step and sides[0] != sides[1]:
            raise _differ(request.optimizer, request.step, *sides)

    def _await(self, worker: int, request: parameters.AwaitStep) -> Acknowledged | None:
        return Acknowledged() if request.step <= self.shard.steps[request.optimizer] else None

    def _list_absent(self, worker: int, request: parameters.ListAbsent) -> MissingWorkers:
        optimizer, step = request.optimizer, request.step
        # A negative step stands for its norm: see `ListAbsent`.
        present = {
            *(
                self._closing.get((optimizer, step), ())
                if step > 0
                else self._asking.get((optimizer, -step), ())
            )
        }
        steps_made = self.shard.steps[optimizer]
        return MissingWorkers(
            tuple((other, steps_made) for other in request.workers if other not in present)
        )

    # ---- parameters

    def _pull(self, worker: int, request: parameters.PullUnit) -> parameters.UnitValues | None:
        flat = self.shard.read(request.unit)
        unit = self.shard.units[request.unit]
        steps_made = self.shard.steps[unit.optimizer]
        if request.step > steps_made + 1 and not request.copy:
            raise UsageError(
                f"unit {request.unit} can't be read after step {request.step}: "
                f"{steps_made} have been taken"
            )
        if request.step > steps_made:
            return None
        # Without a copy, the memory of the shard is sent. In lockstep no worker can close the
        # next step meanwhile. Otherwise other workers may step while the values are sent.
        values: Tensor = flat.clone() if request.copy else flat
        return parameters.UnitValues(values)

    # ---- lost workers

    def _roll_back(self, worker: int, request: recovery.RollBackSteps) -> Acknowledged:
        for optimizer, step in request.steps:
            self.shard.back(optimizer, step)
        self.shard.drop(worker)
        self._norms.clear()
        return Acknowledged()

    def _skip(self, worker: int, request: recovery.SkipStep) -> Acknowledged | None:
        if request.step > self.shard.steps[request.optimizer] + 1:
            # The step before was decided, too, but its request has not come yet.
            return None
        self.shard.skip(request.optimizer, request.step)
        return Acknowledged()

    def _discard(self, worker: int, request: recovery.DiscardPushes) -> Acknowledged:
        self.shard.discard()
        return Acknowledged()

    def _read_shard(self, worker: int, request: recovery.ReadShard) -> recovery.ShardState:
        return recovery.ShardState(
            byte_tensor(pack(self.shard.state_dict(), copy=False).dumps()).split(CHUNK)
        )

    def _load_shard(self, worker: int, request: recovery.LoadShard) -> Acknowledged:
        self.shard.load_state_dict(
            loads(b"".join(chunk.numpy().tobytes() for chunk in request.chunks)).unpack()
        )
        return Acknowledged()
