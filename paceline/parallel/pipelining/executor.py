"""Runs a schedule on one worker: forwards and backwards of its stages, and messages between stages.

    stage 0    F0 --x--> stage 1    F0      lane 0     results of stage 0 go to stage 1
    stage 0    B0 <--g-- stage 1    B0      lane 1     their gradients come back

A message leaves as soon as it is made, and is awaited when it is needed. So workers never wait for
each other in a circle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.group_protocol import Work
from paceline.comm.pairs import PairMessage, Pairs
from paceline.errors import PacelineError, UsageError
from paceline.parallel.pipelining import split_backward
from paceline.parallel.pipelining.operations import OUTPUT
from paceline.parallel.pipelining.schedule import Action, PipelineSchedule
from paceline.parallel.pipelining.stage_messages import (
    Values,
    find_differentiable,
    pack_gradients,
    pack_values,
    unpack_gradients,
    unpack_values,
)


class Passes(Protocol):
    """Backward passes of one step, which count as one pass."""

    def begin_pass(self, *, last: bool) -> None:
        """Begin a pass. If it is the `last`, gradients of its parameters are complete with it."""
        ...

    def gather_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Make these parameters whole again, as the second half of a backward uses their layers."""
        ...

    def end_pass(self) -> None:
        """End a pass."""
        ...


class Stage(Protocol):
    """One of a worker's stages: consecutive layers."""

    def run_stage(self, values: Values) -> Values:
        """Compute the values for the next stage, or the model's output as `output`."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    `inputs` are for the first stage, and `target` is for the loss. `part` is the weight of its loss
    in the batch's. `rows` is 0 for a copy, which is there because other workers wait for each
    micro-batch.
    """

    inputs: Values
    target: Any
    part: float
    rows: int


@dataclass
class _SavedForward:
    """What a forward leaves for its backward.

    `entries` are inputs that need gradients, `outputs` and `grads` the roots of backward and their
    gradients. `later` is the second half, once the first has run.
    """

    entries: list[Tensor]
    outputs: list[Tensor]
    later: split_backward.SecondHalf | None = None
    grads: list[Tensor | None] = field(default_factory=list)


Criterion = Callable[[Any, MicroBatch], tuple[Tensor, float]]
"""Makes of an output the tensor to go back from, and the loss as a number."""


class ActionObserver(Protocol):
    """Is told of a worker's actions, and measures its waits. Times are from `perf_counter_ns`."""

    def wait_for_message(self, work: Work[PairMessage], what: str) -> PairMessage:
        """Wait for a message, whose name is `what`."""
        ...

    def note_action(self, action: Action, began: int, ready: int, ended: int) -> None:
        """Note an action that has ended. It was waiting for messages from `began` to `ready`."""
        ...


class _Unobserved:
    """An observer that measures nothing."""

    def wait_for_message(self, work: Work[PairMessage], what: str) -> PairMessage:
        return work.wait()

    def note_action(self, action: Action, began: int, ready: int, ended: int) -> None: ...


class PipelineExecutor:
    """One worker's side of a pipeline.

    `pairs` connects the workers along `stage`, and `rank` is this worker's place there.
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

    def run_schedule(
        self,
        schedule: PipelineSchedule,
        batches: Sequence[MicroBatch],
        criterion: Criterion | None,
        passes: Passes | None,
        *,
        where: str,
    ) -> PipelinePass:
        """Execute this worker's row of the schedule. Without `passes` there are only forwards.

        `criterion` is the loss; without it, outputs are kept. `where` names the call, for errors
        and for a check of messages.
        """
        work = PipelinePass(self, schedule, batches, criterion, passes=passes, where=where)
        try:
            for action in schedule.rows[self._rank]:
                if passes is not None or action.kind == "forward":
                    began = work.ready_at = time.perf_counter_ns()
                    work.run_action(action)
                    self.observer.note_action(action, began, work.ready_at, time.perf_counter_ns())
            work.finish_sends()
        except PacelineError:
            raise
        except Exception as error:
            error.add_note(
                f"({where}: {work.current_action} failed on the worker that has stage "
                f"{work.current_action and work.current_action.stage})"
            )
            raise
        return work

    @property
    def pairs(self) -> Pairs:
        """The connections that carry messages."""
        return self._pairs

    def get_stage(self, index: int) -> Stage:
        """One of this worker's stages, by its index in the model."""
        return self._stages[index]


class PipelinePass:
    """One batch on its way through one worker.

    `losses` and `outputs` are by micro-batch, on the worker of the last stage. `ready_at` is the
    time in nanoseconds at which the current action had all that it needs.

    `_saved_forwards` is by stage and micro-batch: each forward adds an entry, and its whole
    backward (or `weight` half) takes it out. `_local_messages`, by lane and micro-batch, are
    messages between two stages of this worker.
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
        self._saved_forwards: dict[tuple[int, int], _SavedForward] = {}
        self._local_messages: dict[tuple[int, int], tuple[dict[str, Any], list[Tensor]]] = {}
        self._sends: list[Work[None]] = []
        self.current_action: Action | None = None
        self.ready_at = 0
        self.losses: dict[int, float] = {}
        self.outputs: dict[int, Any] = {}

    def run_action(self, action: Action) -> None:
        """Execute one action of the schedule."""
        self.current_action = action
        if action.kind == "forward":
            self._run_forward(action)
        elif action.kind == "weight":
            self._run_weight_half(action)
        else:
            self._run_backward(action)

    def finish_sends(self) -> None:
        """Wait until all messages are sent, so that their tensors may be written to again."""
        for work in self._sends:
            work.wait()
        self._sends.clear()

    # ---- forward

    def _run_forward(self, action: Action) -> None:
        """Run a stage on its input; send the result, or take the loss of the last stage."""
        schedule, stage, micro_batch = self._schedule, action.stage, action.micro_batch
        batch = self._batches[micro_batch]
        if stage == 0:
            values, entries = batch.inputs, list[Tensor]()
        else:
            head, tensors = self._receive_message(
                stage - 1,
                2 * (stage - 1),
                micro_batch,
                f"what stage {stage - 1} gives stage {stage}",
            )
            received, entries = unpack_values(head, tensors)
            values = {**batch.inputs, **received}
        out = self._executor.get_stage(stage).run_stage(values)
        if stage < schedule.stages - 1:
            head, tensors = pack_values(out, f"stage {stage} of the pipeline")
            self._send_message(stage + 1, 2 * stage, micro_batch, head, tensors)
            outputs = find_differentiable(out)
        elif self._criterion is None:
            self.outputs[micro_batch], outputs = out[OUTPUT], []
        else:
            loss, self.losses[micro_batch] = self._criterion(out[OUTPUT], batch)
            outputs = [loss] if loss.requires_grad else []
        if self._passes is not None:
            self._saved_forwards[stage, micro_batch] = _SavedForward(entries, outputs)

    # ---- backward

    def _run_backward(self, action: Action) -> None:
        """Go back through a stage, wholly or by half; send the gradients of its inputs."""
        schedule, stage, micro_batch = self._schedule, action.stage, action.micro_batch
        held = self._saved_forwards[stage, micro_batch]
        grads: list[Tensor | None] = [None] * len(held.outputs)
        if stage < schedule.stages - 1:
            what = f"the gradients that stage {stage + 1} gives stage {stage}"
            head, tensors = self._receive_message(stage + 1, 2 * stage + 1, micro_batch, what)
            grads = unpack_gradients(head, tensors)
        # An output without a gradient was not used by the next stages. The loss has an implicit
        # one.
        last = stage == schedule.stages - 1
        reached = [
            (output, grad)
            for output, grad in zip(held.outputs, grads, strict=True)
            if last or grad is not None
        ]
        held.outputs, held.grads = [output for output, _ in reached], [grad for _, grad in reached]
        input_grads = (
            self._run_input_half(action, held) if action.kind == "input" and held.entries else None
        )
        if input_grads is None and action.kind == "backward":
            input_grads = self._run_whole_backward(action, held)
            del self._saved_forwards[stage, micro_batch]
        if stage:
            self._send_message(
                stage - 1, 2 * stage - 1, micro_batch, *pack_gradients(input_grads or [])
            )

    def _run_whole_backward(self, action: Action, held: _SavedForward) -> list[Tensor | None]:
        """Go back through a stage, and return the gradients of its inputs."""
        assert self._passes is not None
        self._passes.begin_pass(last=action == self._schedule.last_action(action.stage))
        if held.outputs:
            torch.autograd.backward(held.outputs, held.grads)
        # Ending is collective for workers with parts of the stage, whether or not anything was
        # reached.
        self._passes.end_pass()
        return [entry.grad for entry in held.entries]

    def _run_input_half(self, action: Action, held: _SavedForward) -> list[Tensor | None]:
        """Compute the gradients of inputs alone, and keep the rest for the second half."""
        if not held.outputs:
            return [None] * len(held.entries)
        input_grads, held.later = split_backward.compute_input_gradients(
            held.outputs, held.grads, held.entries
        )
        held.outputs = []
        return input_grads

    def _run_weight_half(self, action: Action) -> None:
        """Compute the gradients of parameters, in the second half of a backward."""
        assert self._passes is not None
        held = self._saved_forwards.pop((action.stage, action.micro_batch))
        # No input needs a gradient, so this half is the whole backward.
        if held.later is None:
            self._run_whole_backward(action, held)
            return
        self._passes.begin_pass(last=action == self._schedule.last_action(action.stage))
        self._passes.gather_parameters(held.later.missing_parameters())
        split_backward.compute_weight_gradients(held.later)
        self._passes.end_pass()

    # ---- messages

    def _send_message(
        self, stage: int, lane: int, micro_batch: int, head: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Send a message to a stage, which may be on this worker."""
        rank = self._schedule.placed[stage]
        if rank == self._schedule.placed[self.current_action.stage]:  # type: ignore[union-attr]
            self._local_messages[lane, micro_batch] = head, tensors
            return
        self._sends = [work for work in self._sends if not work.done()]
        self._sends.append(
            self._executor.pairs.send(
                rank, lane, {"micro": micro_batch, "step": self._where, **head}, tensors
            )
        )

    def _receive_message(
        self, stage: int, lane: int, micro_batch: int, what: str
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Wait for a message from a stage, which may be on this worker."""
        rank = self._schedule.placed[stage]
        if rank == self._schedule.placed[self.current_action.stage]:  # type: ignore[union-attr]
            return self._local_messages.pop((lane, micro_batch))
        work = self._executor.pairs.receive(
            rank, lane, what=f"{what} for micro-batch {micro_batch} in {self._where}"
        )
        message = self._executor.observer.wait_for_message(
            work, f"{what} for micro-batch {micro_batch}"
        )
        self.ready_at = time.perf_counter_ns()
        # A lane keeps its order. Another message comes only from a step that has failed in between.
        if (message.head["step"], message.head["micro"]) != (self._where, micro_batch):
            raise UsageError(
                f"{what}: got micro-batch {message.head['micro']} of {message.head['step']}, and "
                f"wanted micro-batch {micro_batch} of {self._where}; "
                "an earlier run.step failed on one worker, "
                "and the script caught the error; let it end the run"
            )
        return dict(message.head), list(message.tensors)
