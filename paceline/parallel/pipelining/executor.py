"""Runs a schedule on this worker: forwards and backwards of its stages, micro-batch after
micro-batch, and the messages between them.

    stage 0    F0 --x--> stage 1    F0      lane 0     what stage 0 makes goes to stage 1
    stage 0    B0 <--g-- stage 1    B0      lane 1     its gradients come back

A message leaves as soon as it is made, and waits where it is needed: so workers never wait for each
other in a circle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.group import Work
from paceline.comm.pairs import PairMessage, Pairs
from paceline.errors import PacelineError, UsageError
from paceline.parallel.pipelining import halves
from paceline.parallel.pipelining.operations import OUTPUT
from paceline.parallel.pipelining.schedule import Action, PipelineSchedule
from paceline.parallel.pipelining.values import (
    Values,
    pack,
    pack_gradients,
    tensors_needing,
    unpack,
    unpack_gradients,
)


class Passes(Protocol):
    """Backward passes of one step, which count as one."""

    def begin(self, *, last: bool) -> None:
        """Begin a pass.

        `last`: the gradients of the parameters that it reaches are complete with it.
        """
        ...

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Make those whole again of which workers have pieces, as the second half of a backward
        goes through their layers.
        """
        ...

    def end(self) -> None:
        """End a pass."""
        ...


class Stage(Protocol):
    """One of a worker's stages: consecutive layers."""

    def run(self, values: Values) -> Values:
        """Return what goes to the next stage, or the output of the model as `output`."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch: what the first stage gets, what the loss is taken against, and what its
    loss counts in that of the batch.
    """

    inputs: Values
    target: Any
    part: float
    rows: int  # none in a copy, which is there as others wait for this worker in each micro-batch


@dataclass
class _Held:
    """What a forward leaves for its backward."""

    entries: list[Tensor]
    outputs: list[Tensor]
    later: halves.Later | None = None
    grads: list[Tensor | None] = field(default_factory=list)


Criterion = Callable[[Any, MicroBatch], tuple[Tensor, float]]
"""Of an output: what is gone back from, and the loss as a number."""


class ActionObserver(Protocol):
    """Whatever is told of a worker's actions, and measures its waits.

    Times are nanoseconds of `time.perf_counter_ns`.
    """

    def wait(self, work: Work[PairMessage], what: str) -> PairMessage:
        """Wait for a message, whose name is `what`."""
        ...

    def acted(self, action: Action, began: int, ready: int, ended: int) -> None:
        """Note an action that is over.

        At `ready` all that it needs was there: before that the worker has waited.
        """
        ...


class _Unobserved:
    """Measures nothing."""

    def wait(self, work: Work[PairMessage], what: str) -> PairMessage:
        return work.wait()

    def acted(self, action: Action, began: int, ready: int, ended: int) -> None: ...


class PipelineExecutor:
    """One worker's side of a pipeline.

    `pairs` joins the workers along `stage`; `rank` is this one's place there.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        pairs: Pairs,
        rank: int,
        observer: ActionObserver | None = None,
    ) -> None:
        self._stages, self._pairs, self._rank, self.observer = (
            dict(stages),
            pairs,
            rank,
            observer or _Unobserved(),
        )

    def run(
        self,
        schedule: PipelineSchedule,
        batches: Sequence[MicroBatch],
        criterion: Criterion | None,
        passes: Passes | None,
        *,
        where: str,
    ) -> PipelinePass:
        """Go through this worker's row of the schedule, and return what came of it.

        Without `passes` there are forwards alone.
        """
        work = PipelinePass(self, schedule, batches, criterion, passes=passes, where=where)
        try:
            for action in schedule.rows[self._rank]:
                if passes is not None or action.kind == "forward":
                    began = work.ready = time.perf_counter_ns()
                    work.act(action)
                    self.observer.acted(action, began, work.ready, time.perf_counter_ns())
            work.finish()
        except PacelineError:
            raise
        except Exception as error:
            error.add_note(
                f"({where}: {work.present} failed on the worker that has stage "
                f"{work.present and work.present.stage})"
            )
            raise
        return work

    @property
    def pairs(self) -> Pairs:
        """What carries messages."""
        return self._pairs

    def stage(self, number: int) -> Stage:
        """Return one of this worker's stages."""
        return self._stages[number]


class PipelinePass:
    """One batch on its way, as one worker has it.

    `losses`, `outputs`: by micro-batch, on the worker of the last stage.

    `ready`: when all that the action under way needs was there (nanoseconds).
    """

    def __init__(
        self,
        executor: PipelineExecutor,
        schedule: PipelineSchedule,
        batches: Sequence[MicroBatch],
        criterion: Criterion | None,
        *,
        passes: Passes | None,
        where: str,
    ) -> None:
        self._executor, self._schedule, self._batches, self._criterion = (
            executor,
            schedule,
            batches,
            criterion,
        )
        self._passes, self._where = passes, where
        self._held: dict[tuple[int, int], _Held] = {}
        # messages between stages of this worker, by lane
        self._here: dict[tuple[int, int], tuple[dict[str, Any], list[Tensor]]] = {}
        self._sends: list[Work[None]] = []
        self.present: Action | None = None
        self.ready = 0
        self.losses: dict[int, float] = {}
        self.outputs: dict[int, Any] = {}

    def act(self, action: Action) -> None:
        """Do one action of the schedule."""
        self.present = action
        if action.kind == "forward":
            self._forward(action)
        elif action.kind == "weight":
            self._weight(action)
        else:
            self._backward(action)

    def finish(self) -> None:
        """Wait until what was sent may be written to again."""
        for work in self._sends:
            work.wait()
        self._sends.clear()

    # ---- forward

    def _forward(self, action: Action) -> None:
        schedule, stage, number = self._schedule, action.stage, action.micro_batch
        batch = self._batches[number]
        if stage == 0:
            values, entries = batch.inputs, list[Tensor]()
        else:
            head, tensors = self._receive(
                stage - 1, 2 * (stage - 1), number, f"what stage {stage - 1} gives stage {stage}"
            )
            came, entries = unpack(head, tensors)
            values = {**batch.inputs, **came}
        out = self._executor.stage(stage).run(values)
        if stage < schedule.stages - 1:
            head, tensors = pack(out, f"stage {stage} of the pipeline")
            self._send(stage + 1, 2 * stage, number, head, tensors)
            outputs = tensors_needing(out)
        elif self._criterion is None:
            self.outputs[number], outputs = out[OUTPUT], []
        else:
            loss, self.losses[number] = self._criterion(out[OUTPUT], batch)
            outputs = [loss] if loss.requires_grad else []
        if self._passes is not None:
            self._held[stage, number] = _Held(entries, outputs)

    # ---- backward

    def _backward(self, action: Action) -> None:
        schedule, stage, number = self._schedule, action.stage, action.micro_batch
        held = self._held[stage, number]
        grads: list[Tensor | None] = [None] * len(held.outputs)
        if stage < schedule.stages - 1:
            head, tensors = self._receive(
                stage + 1,
                2 * stage + 1,
                number,
                f"the gradients that stage {stage + 1} gives stage {stage}",
            )
            grads = unpack_gradients(head, tensors)
        last = stage == schedule.stages - 1
        reached = [
            (output, grad)
            for output, grad in zip(held.outputs, grads, strict=True)
            if last or grad is not None
        ]
        held.outputs, held.grads = [output for output, _ in reached], [grad for _, grad in reached]
        found = self._halve(action, held) if action.kind == "input" and held.entries else None
        if found is None and action.kind == "backward":
            found = self._whole(action, held)
            del self._held[stage, number]
        if stage:
            self._send(stage - 1, 2 * stage - 1, number, *pack_gradients(found or []))

    def _whole(self, action: Action, held: _Held) -> list[Tensor | None]:
        """Go back through a stage, and return the gradients of what came in."""
        assert self._passes is not None
        self._passes.begin(last=action == self._schedule.last(action.stage))
        if held.outputs:
            torch.autograd.backward(held.outputs, held.grads)
        self._passes.end()  # of all workers that have parts of the stage, whatever came to each
        return [entry.grad for entry in held.entries]

    def _halve(self, action: Action, held: _Held) -> list[Tensor | None]:
        """Take the gradients of what came in, and keep what those of parameters are taken from."""
        if not held.outputs:
            return [None] * len(held.entries)
        found, held.later = halves.input_half(held.outputs, held.grads, held.entries)
        held.outputs = []
        return found

    def _weight(self, action: Action) -> None:
        assert self._passes is not None
        held = self._held.pop((action.stage, action.micro_batch))
        if held.later is None:  # nothing came in that needs gradients: all of backward is this half
            self._whole(action, held)
            return
        self._passes.begin(last=action == self._schedule.last(action.stage))
        self._passes.gather(held.later.parameters())
        halves.weight_half(held.later)
        self._passes.end()

    # ---- messages

    def _send(
        self, stage: int, lane: int, number: int, head: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        rank = self._schedule.placed[stage]
        if rank == self._schedule.placed[self.present.stage]:  # type: ignore[union-attr]
            self._here[lane, number] = head, tensors
            return
        self._sends = [work for work in self._sends if not work.done()]
        self._sends.append(
            self._executor.pairs.send(
                rank, lane, {"micro": number, "step": self._where, **head}, tensors
            )
        )

    def _receive(
        self, stage: int, lane: int, number: int, what: str
    ) -> tuple[dict[str, Any], list[Tensor]]:
        rank = self._schedule.placed[stage]
        if rank == self._schedule.placed[self.present.stage]:  # type: ignore[union-attr]
            return self._here.pop((lane, number))
        work = self._executor.pairs.receive(
            rank, lane, what=f"{what} for micro-batch {number} in {self._where}"
        )
        message = self._executor.observer.wait(work, f"{what} for micro-batch {number}")
        self.ready = time.perf_counter_ns()
        if (message.head["step"], message.head["micro"]) != (self._where, number):
            raise UsageError(
                f"{what} was to be that of micro-batch {number} in {self._where}, and is of "
                f"micro-batch {message.head['micro']} in "
                f"{message.head['step']}: an earlier run.step failed on one worker, and was "
                "caught; let the error end the run"
            )
        return dict(message.head), list(message.tensors)
