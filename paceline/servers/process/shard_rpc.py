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
from paceline.servers.protocol.parameters import SettingChanges
from paceline.servers.protocol.samples import MissingWorkers
from paceline.state.snapshot import copy_to_tensor, make_snapshot, snapshot_from_bytes

# Number of steps whose norms are remembered.
REMEMBERED_NORMS = 8
# Largest number of bytes of a shard that travel as one tensor.
CHUNK_BYTES = 1 << 28


def _check_same_turn(optimizer: int, step: int, turns: Mapping[int, int]) -> None:
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


def _make_difference_error(
    optimizer: int, step: int, *sides: tuple[float, SettingChanges]
) -> UsageError:
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
        self._plan_digest = b""
        # By optimizer and step: the requests of the workers that have closed it so far.
        self._close_requests: dict[tuple[int, int], dict[int, parameters.CloseStep]] = {}
        # By optimizer and step: the workers that have asked for its norm so far.
        self._norm_askers: dict[tuple[int, int], set[int]] = {}
        # By optimizer: the request that made its last step, if one worker's request is enough.
        self._last_decided_steps: dict[int, parameters.CloseStep] = {}
        # By optimizer and step, then by the order of the norm.
        self._norms: dict[tuple[int, int], dict[float, float]] = {}
        self.handlers: Handlers = {
            parameters.PlanShard: self._plan_shard,
            parameters.FillUnit: self._fill_unit,
            parameters.LoadMemories: self._load_memories,
            parameters.ReadMemories: self._read_memories,
            parameters.PushGradient: self._push_gradient,
            parameters.ReadNorm: self._read_norm,
            parameters.CloseStep: self._close_step,
            parameters.AwaitStep: self._await_step,
            parameters.ApplyGradient: self._apply_gradient,
            parameters.ListAbsent: self._list_absent_workers,
            parameters.PullUnit: self._pull_unit,
            recovery.RollBackSteps: self._roll_back_steps,
            recovery.SkipStep: self._skip_step,
            recovery.DiscardPushes: self._discard_pushes,
            recovery.ReadShard: self._read_shard,
            recovery.LoadShard: self._load_shard,
        }

    @property
    def has_shard(self) -> bool:
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

    def _plan_shard(self, worker: int, request: parameters.PlanShard) -> Acknowledged:
        packed = request.plan.numpy().tobytes()
        digest = hashlib.sha256(packed).digest()
        if self._shard is None:
            self._shard, self._plan_digest = Shard(plans.unpack_plan(packed)), digest
        elif digest != self._plan_digest:
            raise UsageError("another plan is in use here: workers have prepared different things")
        return Acknowledged()

    def _fill_unit(self, worker: int, request: parameters.FillUnit) -> Acknowledged:
        self.shard.fill_unit(request.unit, request.values)
        return Acknowledged()

    def _load_memories(self, worker: int, request: parameters.LoadMemories) -> Acknowledged:
        self.shard.load_memories(
            snapshot_from_bytes(request.packed.numpy().tobytes()).unpack_state()["memories"]
        )
        return Acknowledged()

    def _read_memories(
        self, worker: int, request: parameters.ReadMemories
    ) -> parameters.OptimizerMemories:
        return parameters.OptimizerMemories(
            copy_to_tensor(
                make_snapshot({"memories": self.shard.collect_memories()}, copy=False).to_bytes()
            )
        )

    # ---- steps

    def _push_gradient(self, worker: int, request: parameters.PushGradient) -> Acknowledged:
        # A gradient that is too late for its step is acknowledged, and left out.
        if not request.drop_late or self.shard.is_in_time(request.unit, request.step):
            self.shard.push_gradient(
                request.unit,
                worker,
                request.gradient,
                request.used,
                keep=request.keep,
                turn=request.turn,
            )
        return Acknowledged()

    def _apply_gradient(self, worker: int, request: parameters.ApplyGradient) -> Acknowledged:
        factor, part, settings = request.factor, request.part, dict(request.settings)
        self.shard.apply_gradient(
            request.optimizer, worker, request.step, factor=factor, part=part, settings=settings
        )
        return Acknowledged()

    def _read_norm(self, worker: int, request: parameters.ReadNorm) -> parameters.Norm | None:
        shard, key = self.shard, (request.optimizer, request.step)
        steps_made = shard.step_counts[request.optimizer]
        if not request.decided:
            self._check_next_step(*key)
            askers = self._norm_askers.setdefault(key, set())
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
            norm = self._norms[key][request.norm_type] = shard.compute_norm(
                request.optimizer, request.workers, request.norm_type
            )
        self._norms.pop((request.optimizer, request.step - REMEMBERED_NORMS), None)
        return parameters.Norm(norm)

    def _check_next_step(self, optimizer: int, step: int) -> None:
        if step != self.shard.step_counts[optimizer] + 1:
            raise UsageError(
                f"step {step} of optimizer {optimizer} can't come after step "
                f"{self.shard.step_counts[optimizer]}"
            )

    def _close_step(self, worker: int, request: parameters.CloseStep) -> Acknowledged | None:
        key = optimizer, step = request.optimizer, request.step
        steps_made = self.shard.step_counts[optimizer]
        # The request comes again, or another worker's request has made the step.
        if step <= steps_made:
            self._check_same_request(request)
            return Acknowledged()
        if request.decided and step > steps_made + 1:
            # The step before was decided, too, but its request has not come yet.
            return None
        self._check_next_step(optimizer, step)
        if request.decided:
            self._make_step(request)
            self._last_decided_steps[optimizer] = request
            return Acknowledged()
        # In lockstep, the step is made when all workers have closed it in the same way.
        requests = self._close_requests.setdefault(key, {})
        requests[worker] = request
        if any(other not in requests for other in request.workers):
            return None
        _check_same_turn(
            optimizer, step, {other: requests[other].turn for other in request.workers}
        )
        sides = [(requests[other].factor, requests[other].settings) for other in request.workers]
        if any(side != sides[0] for side in sides):
            raise _make_difference_error(optimizer, step, *sides)
        self._make_step(request)
        del self._close_requests[key]
        self._norm_askers.pop(key, None)
        return Acknowledged()

    def _make_step(self, request: parameters.CloseStep) -> None:
        how: dict[str, Any] = {"part": request.part, "keep": request.keep, "undo": request.undo}
        self.shard.close_step(
            request.optimizer,
            request.step,
            request.workers,
            factor=request.factor,
            settings=dict(request.settings),
            **how,
        )

    def _check_same_request(self, request: parameters.CloseStep) -> None:
        """Raise `UsageError` if a step that has been made is closed in another way.

        Only for steps that all workers have to close in the same way.
        """
        earlier = self._last_decided_steps.get(request.optimizer, request)
        sides = [(close.factor, close.settings) for close in (earlier, request)]
        if request.same and earlier.step == request.step and sides[0] != sides[1]:
            raise _make_difference_error(request.optimizer, request.step, *sides)

    def _await_step(self, worker: int, request: parameters.AwaitStep) -> Acknowledged | None:
        return Acknowledged() if request.step <= self.shard.step_counts[request.optimizer] else None

    def _list_absent_workers(self, worker: int, request: parameters.ListAbsent) -> MissingWorkers:
        optimizer, step = request.optimizer, request.step
        # A negative step stands for its norm: see `ListAbsent`.
        present = {
            *(
                self._close_requests.get((optimizer, step), ())
                if step > 0
                else self._norm_askers.get((optimizer, -step), ())
            )
        }
        steps_made = self.shard.step_counts[optimizer]
        return MissingWorkers(
            tuple((other, steps_made) for other in request.workers if other not in present)
        )

    # ---- parameters

    def _pull_unit(self, worker: int, request: parameters.PullUnit) -> parameters.UnitValues | None:
        flat = self.shard.read_unit(request.unit)
        unit = self.shard.units[request.unit]
        steps_made = self.shard.step_counts[unit.optimizer]
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

    def _roll_back_steps(self, worker: int, request: recovery.RollBackSteps) -> Acknowledged:
        for optimizer, step in request.steps:
            self.shard.undo_step(optimizer, step)
        self.shard.discard_worker_pushes(worker)
        self._norms.clear()
        return Acknowledged()

    def _skip_step(self, worker: int, request: recovery.SkipStep) -> Acknowledged | None:
        if request.step > self.shard.step_counts[request.optimizer] + 1:
            # The step before was decided, too, but its request has not come yet.
            return None
        self.shard.skip_step(request.optimizer, request.step)
        return Acknowledged()

    def _discard_pushes(self, worker: int, request: recovery.DiscardPushes) -> Acknowledged:
        self.shard.discard_all_pushes()
        return Acknowledged()

    def _read_shard(self, worker: int, request: recovery.ReadShard) -> recovery.ShardState:
        return recovery.ShardState(
            copy_to_tensor(make_snapshot(self.shard.state_dict(), copy=False).to_bytes()).split(
                CHUNK_BYTES
            )
        )

    def _load_shard(self, worker: int, request: recovery.LoadShard) -> Acknowledged:
        self.shard.load_state_dict(
            snapshot_from_bytes(
                b"".join(chunk.numpy().tobytes() for chunk in request.chunks)
            ).unpack_state()
        )
        return Acknowledged()
