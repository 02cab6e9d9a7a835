"""A server's shard: pieces of parameters in units, their optimizers, and pushes not applied yet.

    worker 0   push(unit 0) push(unit 1)         close(3)          read(unit 0) ...
    worker 1        push(unit 0) push(unit 1)       close(3)            read(unit 0) ...
    shard      | each worker's push is kept   | one step with    | the same values
               | as it came                   | the sum, added   | for all workers
                                              | in worker order

Nothing here waits or sends. A shard is plain state: it is equal on all replicas that get the same
messages in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.bucket_layout import Bucket, BucketShape, build_buckets
from paceline.errors import Mismatch
from paceline.servers.process import optimizers as recipe
from paceline.servers.process.codings import Phases, decode_push
from paceline.servers.process.partition import RowRange


@dataclass
class ShardPlan:
    """The plan of a shard: its pieces, their units, and their optimizers."""

    pieces: list[RowRange]
    # Numbers of the pieces in each unit. All pieces of a unit belong to one optimizer.
    unit_pieces: list[list[int]]
    # By piece: the number of its optimizer, and of its parameter group there.
    piece_owners: list[tuple[int, int]]
    # Name and settings, for `optimizers.make_optimizer`.
    optimizers: list[tuple[str, recipe.Settings]]
    # By unit: the codings in which its gradients travel. Default: all travel exactly.
    unit_phases: list[Phases] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unit_phases = self.unit_phases or [()] * len(self.unit_pieces)

    @property
    def piece_layouts(self) -> list[BucketShape]:
        """The layout of each piece in its unit. Coded units have no gaps between pieces."""
        coded = {
            piece
            for run, ways in zip(self.unit_pieces, self.unit_phases, strict=True)
            for piece in run
            if ways
        }
        cpu = torch.device("cpu")
        return [
            piece.shape._replace(device=cpu, kind="coded" if index in coded else None)
            for index, piece in enumerate(self.pieces)
        ]


@dataclass
class ShardUnit:
    """The pieces that travel as one tensor, and what workers have pushed for them."""

    number: int
    bucket: Bucket
    optimizer: int
    parameters: list[Parameter]
    # Codings in which gradients come; empty if they come exactly.
    phases: Phases
    # By worker: its addend, and a byte for each piece: whether its backward reached the piece.
    pushes: dict[int, tuple[Tensor, bytes]] = field(default_factory=dict)
    # The sum of pushes for the open step, once it is computed, with such bytes.
    gradient_sum: tuple[Tensor, bytes] | None = None
    version: int = 0  # number of changes of the parameters

    def check_tensor(self, flat: Tensor) -> None:
        """Raise `Mismatch` unless a tensor has the shape and dtype of this unit's parameters."""
        own_flat = self.bucket.flat
        if flat.dtype != own_flat.dtype or flat.shape != own_flat.shape:
            raise Mismatch(
                f"unit {self.number} is {str(own_flat.dtype).removeprefix('torch.')} "
                f"{list(own_flat.shape)}, and not "
                f"{str(flat.dtype).removeprefix('torch.')} {list(flat.shape)}"
            )

    def set_values(self, flat: Tensor) -> None:
        """Set the parameters."""
        self.check_tensor(flat)
        self.bucket.flat.copy_(flat)
        self.version += 1

    def keep_push(self, worker: int, flat: Tensor, used: bytes, *, keep: bool, turn: int) -> None:
        """Keep a worker's part of the gradient: see `Shard.push_gradient`."""
        if self.phases:
            flat = decode_push(self.phases, self.bucket, flat, used, turn)
        self.check_tensor(flat)
        if len(used) != len(self.parameters):
            raise Mismatch(
                f"unit {self.number} has {len(self.parameters)} pieces, and the push says of "
                f"{len(used)} whether they were used"
            )
        # A push that came after the sum would be missing in the step, unless it is for a later one.
        if self.gradient_sum is not None and not keep:
            raise Mismatch(
                f"unit {self.number} has been summed for this step: worker {worker} comes too late"
            )
        self.pushes[worker] = flat, used

    def sum_pushes(self, workers: Sequence[int]) -> tuple[Tensor, bytes]:
        """Sum the pushes of these workers, in the order of the list.

        So the sum doesn't depend on which push came first. The pushes are removed, and the sum is
        kept until the step.

        Returns:
            The sum, and a byte for each piece: whether the backward of any worker reached it.
        """
        if self.gradient_sum is None:
            absent = [worker for worker in workers if worker not in self.pushes]
            if absent or not workers:
                raise Mismatch(f"workers {absent} have not pushed all gradients of this step")
            flat, used = self.pushes[workers[0]]
            for worker in workers[1:]:
                addend, other_used = self.pushes[worker]
                flat.add_(addend)
                used = bytes(one | other for one, other in zip(used, other_used, strict=True))
            self.gradient_sum = flat, used
            for worker in workers:
                del self.pushes[worker]
        return self.gradient_sum

    def assign_gradient(self, flat: Tensor, used: bytes) -> None:
        """Set the gradient of the pieces that were used. Other pieces get none."""
        for parameter, view, reached in zip(
            self.parameters, self.bucket.views_over(flat), used, strict=True
        ):
            parameter.grad = view if reached else None

    def finish_step(self) -> None:
        """Count the change, and drop the gradients, after the optimizer has stepped."""
        self.version += 1
        for parameter in self.parameters:
            parameter.grad = None

    def copy_state(self, own: Optimizer) -> dict[str, Any]:
        """Copy the state that a step changes: values, and the optimizer's state of each piece."""
        memories = [_clone_memory(own.state.get(parameter, {})) for parameter in self.parameters]
        return {"values": self.bucket.flat.clone(), "memories": memories}

    def restore_state(self, own: Optimizer, state: Mapping[str, Any]) -> None:
        """Return to a state that `copy_state` gave."""
        self.bucket.flat.copy_(state["values"])
        self.version += 1
        for parameter, memory in zip(self.parameters, state["memories"], strict=True):
            recipe.set_optimizer_state(own, parameter, memory)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters and the pushes."""
        return self.bucket.flat.nbytes + sum(flat.nbytes for flat, _ in self.pushes.values())


class Shard:
    """One server's part of the parameters.

    A push is identified by its worker and unit. If it comes again before it is applied, it replaces
    the earlier one. A step is identified by its optimizer and its number, from 1 on. If it comes
    again, it does nothing. So a worker may repeat any message that it is unsure of.

    `step_counts` has the number of the last step of each optimizer.
    """

    def __init__(self, plan: ShardPlan) -> None:
        buckets = build_buckets(
            plan.piece_layouts,
            plan.unit_pieces,
            lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device),
        )
        self.plan = plan
        self.units: list[ShardUnit] = []
        for number, (run, bucket, ways) in enumerate(
            zip(plan.unit_pieces, buckets, plan.unit_phases, strict=True)
        ):
            (optimizer,) = {plan.piece_owners[piece][0] for piece in run}
            self.units.append(
                ShardUnit(
                    number, bucket, optimizer, [Parameter(view) for view in bucket.views], ways
                )
            )
        self.optimizers = [
            self._make_optimizer(number, *name_and_settings)
            for number, name_and_settings in enumerate(plan.optimizers)
        ]
        self.step_counts = [0] * len(self.optimizers)
        # By optimizer: the state before its last step, if that can be undone.
        self._undo_states: dict[int, dict[str, Any]] = {}
        # By worker and optimizer: number of its own steps, if workers are not in lockstep.
        self.worker_step_counts: dict[tuple[int, int], int] = {}

    def _make_optimizer(self, number: int, name: str, settings: recipe.Settings) -> Optimizer:
        groups = [list[Parameter]() for _ in settings]
        for run, unit in zip(self.plan.unit_pieces, self.units, strict=True):
            for piece, parameter in zip(run, unit.parameters, strict=True):
                owner, group = self.plan.piece_owners[piece]
                if owner == number:
                    groups[group].append(parameter)
        return recipe.make_optimizer(name, settings, groups)

    # ---- values

    def fill_unit(self, unit: int, flat: Tensor) -> None:
        """Set the parameters of a unit."""
        self._get_unit(unit).set_values(flat)

    def read_unit(self, unit: int) -> Tensor:
        """Get the parameters of a unit: the memory itself, which the next step changes."""
        return self._get_unit(unit).bucket.flat

    def _get_unit(self, number: int) -> ShardUnit:
        if not 0 <= number < len(self.units):
            raise Mismatch(f"there is no unit {number}: there are {len(self.units)}")
        return self.units[number]

    # ---- in lockstep

    def push_gradient(
        self,
        number: int,
        worker: int,
        flat: Tensor,
        used: bytes,
        *,
        keep: bool = False,
        turn: int = 0,
    ) -> None:
        """Add a worker's weighted part to the gradient of a unit. The shard keeps the tensor.

        Args:
            number: Number of the unit.
            worker: The worker that pushes.
            flat: The gradient, 1-D, in the layout of the unit, or coded.
            used: A byte for each piece: whether the worker's backward reached it.
            keep: The push may be for a later step than the next one.
            turn: The worker's turn, which determines the coding.

        Raises:
            Mismatch: If the push doesn't fit the unit, or comes too late for this step and `keep`
                is False.
        """
        self._get_unit(number).keep_push(worker, flat, used, keep=keep, turn=turn)

    def list_missing_workers(self, optimizer: int, workers: Sequence[int]) -> list[int]:
        """List the workers, among these, that have not pushed all units of an optimizer yet."""
        units = [
            unit for unit in self.units if unit.optimizer == optimizer and unit.gradient_sum is None
        ]
        return [worker for worker in workers if any(worker not in unit.pushes for unit in units)]

    def compute_norm(self, optimizer: int, workers: Sequence[int], kind: float = 2.0) -> float:
        """Compute the norm of the sum of these workers' gradients, over all units of an optimizer.

        `kind` is the order of the norm, as in torch. Afterwards nothing more may be pushed for the
        step, because the sums are kept.
        """
        sums = [unit.sum_pushes(workers) for unit in self.units if unit.optimizer == optimizer]
        norms = [float(torch.linalg.vector_norm(flat, kind)) for flat, _ in sums]
        if not kind > 0:
            raise Mismatch(f"there is no norm of kind {kind}")
        return (
            max(norms, default=0.0)
            if kind == math.inf
            else sum(norm**kind for norm in norms) ** (1 / kind)
        )

    def close_step(
        self,
        optimizer: int,
        step: int,
        workers: Sequence[int],
        *,
        factor: float = 1.0,
        settings: Any = None,
        part: float = 1.0,
        keep: bool = False,
        undo: bool = False,
    ) -> bool:
        """Take a step with the sum of these workers' pushes.

        Args:
            optimizer: Number of the optimizer.
            step: Number of the step, from 1 on.
            workers: The workers whose pushes are summed, in this order.
            factor: Factor of the sum.
            settings: Changed settings, as `optimizers.diff_settings` gives them.
            part: Part of the global batch that these workers have. It multiplies the learning rate.
            keep: Keep the pushes of other workers for a later step.
            undo: Keep the state before the step, so that `undo_step` can undo it until the next.

        Returns:
            True; False if the step was taken before.

        Raises:
            Mismatch: If this isn't the next step.
        """
        if step <= self.step_counts[optimizer]:
            return False
        if step != self.step_counts[optimizer] + 1:
            raise Mismatch(
                f"step {step} of optimizer {optimizer} can't come after step "
                f"{self.step_counts[optimizer]}"
            )
        if (
            (absent := self.list_missing_workers(optimizer, workers))
            or not workers
            or len({*workers}) < len(workers)
        ):
            listed = absent or [*workers]
            raise Mismatch(f"workers {listed} have not pushed all gradients of this step")
        # All checks come before the first change, so that a refused message has no effect.
        recipe.check_settings(self.optimizers[optimizer], settings or {})
        units = [unit for unit in self.units if unit.optimizer == optimizer]
        if undo:
            own = self.optimizers[optimizer]
            copies, settings_before = (
                [unit.copy_state(own) for unit in units],
                recipe.read_settings(own),
            )
            self._undo_states[optimizer] = {
                "step": self.step_counts[optimizer],
                "units": copies,
                "settings": settings_before,
            }
        recipe.apply_settings(self.optimizers[optimizer], settings or {})
        for unit in units:
            flat, used = unit.sum_pushes(workers)
            unit.assign_gradient(flat if factor == 1.0 else flat.mul_(factor), used)
        recipe.take_step(self.optimizers[optimizer], part)
        for unit in units:
            unit.gradient_sum = None
            if not keep:
                unit.pushes.clear()
            unit.finish_step()
        self.step_counts[optimizer] = step
        return True

    def skip_step(self, optimizer: int, step: int) -> None:
        """Count a step as made, without changing anything, unless it has been made.

        Called if none of the workers that were to make it is left.
        """
        if step == self.step_counts[optimizer] + 1:
            for unit in self.units:
                unit.gradient_sum = None if unit.optimizer == optimizer else unit.gradient_sum
            self.step_counts[optimizer] = step

    def undo_step(self, optimizer: int, step: int) -> bool:
        """Undo the last step, which was made with `undo`. Returns False if that has been done.

        Raises `Mismatch` if `step` isn't the last one.
        """
        if self.step_counts[optimizer] == step - 1:
            return False
        before = self._undo_states.pop(optimizer, None)
        if before is None or before["step"] != step - 1 or self.step_counts[optimizer] != step:
            raise Mismatch(
                f"step {step} of optimizer {optimizer} can't be undone: "
                f"{self.step_counts[optimizer]} have been taken"
            )
        units = [unit for unit in self.units if unit.optimizer == optimizer]
        for unit, unit_state in zip(units, before["units"], strict=True):
            unit.restore_state(self.optimizers[optimizer], unit_state)
        recipe.replace_settings(self.optimizers[optimizer], before["settings"])
        self.step_counts[optimizer] = step - 1
        return True

    def is_in_time(self, number: int, step: int) -> bool:
        """Whether a push for this step of the unit's optimizer can still take part in it."""
        unit = self._get_unit(number)
        if step > self.step_counts[unit.optimizer] + 1:
            raise Mismatch(
                f"unit {number} can't be pushed for step {step}: "
                f"{self.step_counts[unit.optimizer]} have been taken"
            )
        return step == self.step_counts[unit.optimizer] + 1 and unit.gradient_sum is None

    def apply_gradient(
        self,
        optimizer: int,
        worker: int,
        step: int,
        *,
        factor: float = 1.0,
        part: float = 1.0,
        settings: Any = None,
    ) -> bool:
        """Take a step with this worker's push alone.

        The steps that all workers make of one global batch have about the same effect as one step
        with all of it (equal to the first order), because each multiplies the learning rate by its
        part.

        Args:
            optimizer: Number of the optimizer.
            worker: The worker.
            step: Number of this worker's step, from 1 on.
            factor: Factor of the gradient.
            part: The worker's part of the global batch. It multiplies the learning rate.
            settings: Settings of all groups.

        Returns:
            True; False if the worker's step of this number was taken before.

        Raises:
            Mismatch: If this isn't the worker's next step.
        """
        last_step = self.worker_step_counts.get((worker, optimizer), 0)
        if step <= last_step:
            return False
        if step != last_step + 1:
            raise Mismatch(f"step {step} of worker {worker} can't come after its step {last_step}")
        units = [unit for unit in self.units if unit.optimizer == optimizer]
        if any(worker not in unit.pushes for unit in units):
            raise Mismatch(f"worker {worker} has not pushed all of its step {step}")
        recipe.check_settings(self.optimizers[optimizer], settings or {})
        recipe.apply_settings(self.optimizers[optimizer], settings or {})
        for unit in units:
            flat, used = unit.pushes.pop(worker)
            unit.assign_gradient(flat if factor == 1.0 else flat.mul_(factor), used)
        recipe.take_step(self.optimizers[optimizer], part)
        for unit in units:
            unit.finish_step()
        self.worker_step_counts[worker, optimizer] = step
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, the optimizers' state, and the pushes."""
        memories = [memory for optimizer in self.optimizers for memory in optimizer.state.values()]
        remembered = sum(
            value.nbytes
            for memory in memories
            for value in memory.values()
            if isinstance(value, Tensor)
        )
        return remembered + sum(unit.nbytes for unit in self.units)

    def discard_worker_pushes(self, worker: int) -> None:
        """Discard this worker's unapplied pushes, and all sums, because the turn is dealt again."""
        for unit in self.units:
            unit.gradient_sum = None
            unit.pushes.pop(worker, None)

    def discard_all_pushes(self) -> None:
        """Discard all pushes that are not applied."""
        for unit in self.units:
            unit.gradient_sum = None
            unit.pushes.clear()

    # ---- state

    def collect_memories(self) -> list[dict[str, Any]]:
        """Collect the optimizers' state of each piece, in the order of the pieces."""
        memories_by_piece: list[dict[str, Any]] = [{} for _ in self.plan.pieces]
        for run, unit in zip(self.plan.unit_pieces, self.units, strict=True):
            for piece, parameter in zip(run, unit.parameters, strict=True):
                memories_by_piece[piece] = dict(
                    self.optimizers[unit.optimizer].state.get(parameter, {})
                )
        return memories_by_piece

    def load_memories(self, memories: Sequence[Mapping[str, Any]]) -> None:
        """Set the optimizers' state of each piece, as `collect_memories` gives it.

        The pieces may have been cut differently before.
        """
        for run, unit in zip(self.plan.unit_pieces, self.units, strict=True):
            for piece, parameter in zip(run, unit.parameters, strict=True):
                recipe.set_optimizer_state(
                    self.optimizers[unit.optimizer], parameter, _clone_memory(memories[piece])
                )

    def state_dict(self) -> dict[str, Any]:
        """Get the state that a replica needs, with pushes and the state before the last step."""
        return {
            "values": [unit.bucket.flat for unit in self.units],
            "versions": [unit.version for unit in self.units],
            "memories": self.collect_memories(),
            "settings": [recipe.read_settings(optimizer) for optimizer in self.optimizers],
            "steps": list(self.step_counts),
            "applied": [[*key, step] for key, step in self.worker_step_counts.items()],
            "pushed": [
                [[worker, flat, used] for worker, (flat, used) in unit.pushes.items()]
                for unit in self.units
            ],
            "totals": [
                None if unit.gradient_sum is None else list(unit.gradient_sum)
                for unit in self.units
            ],
            "before": [
                self._undo_states.get(optimizer) for optimizer in range(len(self.optimizers))
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another shard with the same plan."""
        for number, (unit, flat, version) in enumerate(
            zip(self.units, state["values"], state["versions"], strict=True)
        ):
            self.fill_unit(number, flat)
            unit.version = version
            unit.pushes = {
                worker: (addend.clone(), used) for worker, addend, used in state["pushed"][number]
            }
            total = state["totals"][number]
            unit.gradient_sum = None if total is None else (total[0].clone(), total[1])
        self.load_memories(state["memories"])
        for optimizer, saved in zip(self.optimizers, state["settings"], strict=True):
            recipe.replace_settings(optimizer, saved)
        self.step_counts = list(state["steps"])
        self.worker_step_counts = {
            (worker, optimizer): step for worker, optimizer, step in state["applied"]
        }
        # Optimizers whose last step can't be undone have no state before it.
        self._undo_states = {
            optimizer: saved for optimizer, saved in enumerate(state["before"]) if saved is not None
        }


def _clone_memory(memory: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in memory.items()
    }
