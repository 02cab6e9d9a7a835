"""A server's shard: pieces of parameters in units, their optimizers, and pushes not applied yet.

    worker 0   push(unit 0) push(unit 1)         close(3)          read(unit 0) ...
    worker 1        push(unit 0) push(unit 1)       close(3)            read(unit 0) ...
    shard      | kept by worker, as it came   | one step         | the same for all
                                              | with the sum,
                                              | in the order of workers

Nothing here waits or sends: it is plain state, equal on all replicas that get the same messages in
the same order.
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
from paceline.servers.process.codings import Phases, decode
from paceline.servers.process.partition import RowRange


@dataclass
class ShardPlan:
    """The plan of a shard.

    `runs`: the numbers of the pieces in each unit; all those of a unit belong to one optimizer.

    `ways`: the codings in which each unit travels (left out: all exactly).
    """

    pieces: list[RowRange]
    runs: list[list[int]]
    owners: list[tuple[int, int]]  # of each piece: its optimizer, and the group of it
    optimizers: list[tuple[str, recipe.Settings]]
    ways: list[Phases] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ways = self.ways or [()] * len(self.runs)

    @property
    def shapes(self) -> list[BucketShape]:
        """The layout of the pieces in units: without gaps where they are coded."""
        coded = {
            number for run, ways in zip(self.runs, self.ways, strict=True) for number in run if ways
        }
        cpu = torch.device("cpu")
        return [
            piece.shape._replace(device=cpu, kind="coded" if n in coded else None)
            for n, piece in enumerate(self.pieces)
        ]


@dataclass
class ShardUnit:
    """The pieces that travel as one tensor, and what workers have pushed for them."""

    number: int
    bucket: Bucket
    optimizer: int
    parameters: list[Parameter]
    ways: Phases  # codings in which gradients come; none if they come exactly
    # by worker: addend, and which of its pieces were used
    pushed: dict[int, tuple[Tensor, bytes]] = field(default_factory=dict)
    total: tuple[Tensor, bytes] | None = None
    version: int = 0  # how often it was changed

    def check(self, flat: Tensor) -> None:
        """Raise `Mismatch` for a tensor that can't be the parameters of this unit, or their
        gradient.
        """
        have = self.bucket.flat
        if flat.dtype != have.dtype or flat.shape != have.shape:
            raise Mismatch(
                f"unit {self.number} is {str(have.dtype).removeprefix('torch.')} "
                f"{list(have.shape)}, and not "
                f"{str(flat.dtype).removeprefix('torch.')} {list(flat.shape)}"
            )

    def fill(self, flat: Tensor) -> None:
        """Set the parameters."""
        self.check(flat)
        self.bucket.flat.copy_(flat)
        self.version += 1

    def push(self, worker: int, flat: Tensor, used: bytes, *, keep: bool, turn: int) -> None:
        """Keep a worker's part of the gradient: see `Shard.push`."""
        if self.ways:
            flat = decode(self.ways, self.bucket, flat, used, turn)
        self.check(flat)
        if len(used) != len(self.parameters):
            raise Mismatch(
                f"unit {self.number} has {len(self.parameters)} pieces, and it is said of "
                f"{len(used)} whether they were used"
            )
        if self.total is not None and not keep:
            raise Mismatch(
                f"unit {self.number} has been summed for this step: worker {worker} comes too late"
            )
        self.pushed[worker] = flat, used

    def sum(self, workers: Sequence[int]) -> tuple[Tensor, bytes]:
        """Sum what these workers have pushed, in their order, whichever came first; return it,
        and which pieces any of them used.
        """
        if self.total is None:
            absent = [worker for worker in workers if worker not in self.pushed]
            if absent or not workers:
                raise Mismatch(f"workers {absent} have not pushed what they are to be summed with")
            flat, used = self.pushed[workers[0]]
            for worker in workers[1:]:
                more, theirs = self.pushed[worker]
                flat.add_(more)
                used = bytes(one | other for one, other in zip(used, theirs, strict=True))
            self.total = flat, used
            for worker in workers:
                del self.pushed[worker]
        return self.total

    def assign(self, flat: Tensor, used: bytes) -> None:
        """Let this be the gradient of the pieces that were used."""
        for parameter, view, reached in zip(
            self.parameters, self.bucket.views_over(flat), used, strict=True
        ):
            parameter.grad = view if reached else None

    def stepped(self) -> None:
        """Note that the optimizer has stepped."""
        self.version += 1
        for parameter in self.parameters:
            parameter.grad = None

    def copy(self, own: Optimizer) -> dict[str, Any]:
        """Copy what a step changes of it: values, and what the optimizer remembers."""
        memories = [_cloned(own.state.get(parameter, {})) for parameter in self.parameters]
        return {"values": self.bucket.flat.clone(), "memories": memories}

    def restore(self, own: Optimizer, copied: Mapping[str, Any]) -> None:
        """Become what `copy` gave."""
        self.bucket.flat.copy_(copied["values"])
        self.version += 1
        for parameter, memory in zip(self.parameters, copied["memories"], strict=True):
            recipe.recall(own, parameter, memory)

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and of pushes."""
        return self.bucket.flat.nbytes + sum(flat.nbytes for flat, _ in self.pushed.values())


class Shard:
    """One server's part of the parameters.

    A push is known by its worker and unit: one that comes again before it is applied replaces the
    first. A step is known by its number (of each optimizer, from 1 on): one that comes again does
    nothing.
    """

    def __init__(self, plan: ShardPlan) -> None:
        buckets = build_buckets(
            plan.shapes,
            plan.runs,
            lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device),
        )
        self.plan = plan
        self.units: list[ShardUnit] = []
        for number, (run, bucket, ways) in enumerate(
            zip(plan.runs, buckets, plan.ways, strict=True)
        ):
            (optimizer,) = {plan.owners[piece][0] for piece in run}
            self.units.append(
                ShardUnit(
                    number, bucket, optimizer, [Parameter(view) for view in bucket.views], ways
                )
            )
        self.optimizers = [
            self._optimizer(number, *found) for number, found in enumerate(plan.optimizers)
        ]
        self.steps = [0] * len(self.optimizers)
        # by optimizer: the values before its last step, where it can be undone
        self._before: dict[int, dict[str, Any]] = {}
        # by worker and optimizer: its steps, where workers are not in lockstep
        self.applied: dict[tuple[int, int], int] = {}

    def _optimizer(self, number: int, name: str, settings: recipe.Settings) -> Optimizer:
        groups = [list[Parameter]() for _ in settings]
        for run, unit in zip(self.plan.runs, self.units, strict=True):
            for piece, parameter in zip(run, unit.parameters, strict=True):
                owner, group = self.plan.owners[piece]
                if owner == number:
                    groups[group].append(parameter)
        return recipe.make(name, settings, groups)

    # ---- values

    def fill(self, unit: int, flat: Tensor) -> None:
        """Set the parameters of a unit."""
        self._unit(unit).fill(flat)

    def read(self, unit: int) -> Tensor:
        """Return the parameters of a unit as they are now: the memory itself, which the next
        step changes.
        """
        return self._unit(unit).bucket.flat

    def _unit(self, number: int) -> ShardUnit:
        if not 0 <= number < len(self.units):
            raise Mismatch(f"there is no unit {number}: there are {len(self.units)}")
        return self.units[number]

    # ---- in lockstep

    def push(
        self,
        number: int,
        worker: int,
        flat: Tensor,
        used: bytes,
        *,
        keep: bool = False,
        turn: int = 0,
    ) -> None:
        """Add a worker's weighted part to the gradient of a unit; `used`: a byte for each piece,
        whether its backward reached it.

        The tensor belongs to the shard from then on. `turn`: of the worker, which says in which
        coding it comes. Raises `Mismatch` for a push that doesn't fit, and, unless it is to be kept
        for a later step, for one that comes too late for this step.
        """
        self._unit(number).push(worker, flat, used, keep=keep, turn=turn)

    def missing(self, optimizer: int, workers: Sequence[int]) -> list[int]:
        """Return the workers, of these, that have not pushed everything yet."""
        units = [unit for unit in self.units if unit.optimizer == optimizer and unit.total is None]
        return [worker for worker in workers if any(worker not in unit.pushed for unit in units)]

    def norm(self, optimizer: int, workers: Sequence[int], kind: float = 2.0) -> float:
        """Return the norm of these workers' pushed gradients, over all units of an optimizer;
        nothing may be pushed any more.
        """
        found = [unit.sum(workers) for unit in self.units if unit.optimizer == optimizer]
        norms = [float(torch.linalg.vector_norm(flat, kind)) for flat, _ in found]
        if not kind > 0:
            raise Mismatch(f"there is no norm of kind {kind}")
        return (
            max(norms, default=0.0)
            if kind == math.inf
            else sum(norm**kind for norm in norms) ** (1 / kind)
        )

    def close(
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
        """Take a step with the sum of these workers' pushes, times `factor`; False if it has been
        taken before.

        `settings`: what `optimizers.changed` found; the learning rate is multiplied by `part`, that
        of the global batch which they have. `keep`: pushes of others stay, for a later step.
        `undo`: so that `back` can undo it, until its next.

        Raises `Mismatch` for a step that isn't the next one.
        """
        if step <= self.steps[optimizer]:
            return False
        if step != self.steps[optimizer] + 1:
            raise Mismatch(
                f"step {step} of optimizer {optimizer} can't come after step "
                f"{self.steps[optimizer]}"
            )
        if (
            (absent := self.missing(optimizer, workers))
            or not workers
            or len({*workers}) < len(workers)
        ):
            who = absent or [*workers]
            raise Mismatch(f"workers {who} have not pushed what they are to be summed with")
        recipe.fits(self.optimizers[optimizer], settings or {})
        units = [unit for unit in self.units if unit.optimizer == optimizer]
        if undo:
            own = self.optimizers[optimizer]
            copies, settings_before = [unit.copy(own) for unit in units], recipe.settings(own)
            self._before[optimizer] = {
                "step": self.steps[optimizer],
                "units": copies,
                "settings": settings_before,
            }
        recipe.amend(self.optimizers[optimizer], settings or {})
        for unit in units:
            flat, used = unit.sum(workers)
            unit.assign(flat if factor == 1.0 else flat.mul_(factor), used)
        recipe.step(self.optimizers[optimizer], part)
        for unit in units:
            unit.total = None
            if not keep:
                unit.pushed.clear()
            unit.stepped()
        self.steps[optimizer] = step
        return True

    def skip(self, optimizer: int, step: int) -> None:
        """Count a step as made with nothing in it, unless it has been made: nobody who was to
        make it is left.
        """
        if step == self.steps[optimizer] + 1:
            for unit in self.units:
                unit.total = None if unit.optimizer == optimizer else unit.total
            self.steps[optimizer] = step

    def back(self, optimizer: int, step: int) -> bool:
        """Undo this step, which was made with `undo`; False if that has been done.

        Raises `Mismatch` for another than the last one.
        """
        if self.steps[optimizer] == step - 1:
            return False
        before = self._before.pop(optimizer, None)
        if before is None or before["step"] != step - 1 or self.steps[optimizer] != step:
            raise Mismatch(
                f"step {step} of optimizer {optimizer} can't be undone: "
                f"{self.steps[optimizer]} have been taken"
            )
        units = [unit for unit in self.units if unit.optimizer == optimizer]
        for unit, copied in zip(units, before["units"], strict=True):
            unit.restore(self.optimizers[optimizer], copied)
        recipe.put(self.optimizers[optimizer], before["settings"])
        self.steps[optimizer] = step - 1
        return True

    def in_time(self, number: int, step: int) -> bool:
        """Whether a push for this step of the unit's optimizer can still be in it."""
        unit = self._unit(number)
        if step > self.steps[unit.optimizer] + 1:
            raise Mismatch(
                f"unit {number} can't be pushed for step {step}: "
                f"{self.steps[unit.optimizer]} have been taken"
            )
        return step == self.steps[unit.optimizer] + 1 and unit.total is None

    def apply(
        self,
        optimizer: int,
        worker: int,
        step: int,
        *,
        factor: float = 1.0,
        part: float = 1.0,
        settings: Any = None,
    ) -> bool:
        """Take a step with this worker's push alone, times `factor`; False if its step of this
        number has been taken before.

        The learning rate is multiplied by `part`, the worker's part of the global batch: what all
        workers make of one comes to what a step with all of it would, to the first order.
        `settings`: of all groups. Raises `Mismatch` for a step that isn't its next one.
        """
        done = self.applied.get((worker, optimizer), 0)
        if step <= done:
            return False
        if step != done + 1:
            raise Mismatch(f"step {step} of worker {worker} can't come after its step {done}")
        units = [unit for unit in self.units if unit.optimizer == optimizer]
        if any(worker not in unit.pushed for unit in units):
            raise Mismatch(f"worker {worker} has not pushed all of its step {step}")
        recipe.fits(self.optimizers[optimizer], settings or {})
        recipe.amend(self.optimizers[optimizer], settings or {})
        for unit in units:
            flat, used = unit.pushed.pop(worker)
            unit.assign(flat if factor == 1.0 else flat.mul_(factor), used)
        recipe.step(self.optimizers[optimizer], part)
        for unit in units:
            unit.stepped()
        self.applied[worker, optimizer] = step
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, of the optimizers' state, and of pushes."""
        memories = [memory for optimizer in self.optimizers for memory in optimizer.state.values()]
        remembered = sum(
            value.nbytes
            for memory in memories
            for value in memory.values()
            if isinstance(value, Tensor)
        )
        return remembered + sum(unit.nbytes for unit in self.units)

    def drop(self, worker: int) -> None:
        """Discard this worker's pushes that are not applied, and all sums, as the turn is dealt
        again.
        """
        for unit in self.units:
            unit.total = None
            unit.pushed.pop(worker, None)

    def discard(self) -> None:
        """Discard all pushes that are not applied."""
        for unit in self.units:
            unit.total = None
            unit.pushed.clear()

    # ---- state

    def memories(self) -> list[dict[str, Any]]:
        """Return the optimizers' state of each piece, in the order of the pieces."""
        found: list[dict[str, Any]] = [{} for _ in self.plan.pieces]
        for run, unit in zip(self.plan.runs, self.units, strict=True):
            for piece, parameter in zip(run, unit.parameters, strict=True):
                found[piece] = dict(self.optimizers[unit.optimizer].state.get(parameter, {}))
        return found

    def remember(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Set the optimizers' state of each piece: what `memories` gave, perhaps for pieces that
        were cut otherwise.
        """
        for run, unit in zip(self.plan.runs, self.units, strict=True):
            for piece, parameter in zip(run, unit.parameters, strict=True):
                recipe.recall(self.optimizers[unit.optimizer], parameter, _cloned(found[piece]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a replica needs: values, the optimizers' state and settings,
        steps, and pushes.
        """
        return {
            "values": [unit.bucket.flat for unit in self.units],
            "versions": [unit.version for unit in self.units],
            "memories": self.memories(),
            "settings": [recipe.settings(optimizer) for optimizer in self.optimizers],
            "steps": list(self.steps),
            "applied": [[*key, step] for key, step in self.applied.items()],
            "pushed": [
                [[worker, flat, used] for worker, (flat, used) in unit.pushed.items()]
                for unit in self.units
            ],
            "totals": [None if unit.total is None else list(unit.total) for unit in self.units],
            "before": [self._before.get(optimizer) for optimizer in range(len(self.optimizers))],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` gave on a shard of the same plan."""
        for number, (unit, flat, version) in enumerate(
            zip(self.units, state["values"], state["versions"], strict=True)
        ):
            self.fill(number, flat)
            unit.version = version
            unit.pushed = {
                worker: (addend.clone(), used) for worker, addend, used in state["pushed"][number]
            }
            total = state["totals"][number]
            unit.total = None if total is None else (total[0].clone(), total[1])
        self.remember(state["memories"])
        for optimizer, found in zip(self.optimizers, state["settings"], strict=True):
            recipe.put(optimizer, found)
        self.steps = list(state["steps"])
        self.applied = {(worker, optimizer): step for worker, optimizer, step in state["applied"]}
        self._before = {
            optimizer: found for optimizer, found in enumerate(state["before"]) if found is not None
        }


def _cloned(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in found.items()
    }
