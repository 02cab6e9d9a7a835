"""One worker's side of a model with layers on several workers: its stages, and steps through all.

step    all workers agree on the input    rows, and errors
        the schedule                      executor.py
        tied weights                      gradients are summed over the stages that have them
        all workers agree on the end      loss, and which parameters have gradients
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.group_protocol import Group
from paceline.comm.pairs import Pairs
from paceline.errors import DataError, PacelineError, UsageError
from paceline.parallel.following.followed_graph import FollowedGraph
from paceline.parallel.pipelining.batches import BatchShare, cut_batch
from paceline.parallel.pipelining.executor import MicroBatch, Passes, PipelineExecutor, PipelinePass
from paceline.parallel.pipelining.layer_graph import LayerGraph, StagePart
from paceline.parallel.pipelining.measuring import preserve_state
from paceline.parallel.pipelining.profiler import PipelineProfiler
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.stage_messages import Values, pack_values, unpack_values
from paceline.parallel.tensor.random_zone import RandomZone
from paceline.parallel.torch_pytree import tree_leaves

# Characters of an error that other workers are told.
LONGEST_REASON = 200


class JoinablePasses(Passes, Protocol):
    """Backward passes of a step, with parameters whose exchange waits for the end of the step."""

    @property
    def silent(self) -> bool:
        """Whether nothing is exchanged yet at the end of this step."""
        ...

    def delay_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Exchange gradients of these parameters at the end of the step only."""
        ...

    def accumulated_total(self, parameter: Tensor) -> Tensor | None:
        """Sum of a delayed parameter's gradients in this step; None if it has none."""
        ...

    def set_accumulated(self, parameter: Tensor, total: Tensor) -> None:
        """Replace the gradient that the step has added up for a delayed parameter."""
        ...

    def close(self) -> None:
        """Exchange the gradients of this step."""
        ...


@dataclass(frozen=True)
class StageSplit:
    """Which layers are where.

    `bounds` has the first layer of each stage, and the number of layers. `placed` has the place
    along `stage` that holds each stage.
    """

    bounds: tuple[int, ...]
    placed: tuple[int, ...]

    def stages_of_rank(self, rank: int) -> list[int]:
        """The stages of one worker."""
        return [stage for stage, place in enumerate(self.placed) if place == rank]

    def layer_range(self, stage: int) -> tuple[int, int]:
        """The first layer of a stage, and the first after it."""
        return self.bounds[stage], self.bounds[stage + 1]


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of several stages. `group` are the workers that have it, if they are several."""

    parameter: Parameter
    group: Group | None


@dataclass(frozen=True)
class StageHolding:
    """The parameters of one worker under a split, by name.

    `own` are on this worker. `elsewhere` are the empty ones that stand for parameters of other
    stages.
    """

    split: StageSplit
    ties: tuple[SharedParameter, ...]
    own: Mapping[str, Parameter]
    elsewhere: Mapping[str, Parameter]


@dataclass
class PipelineTerms:
    """How a pipeline runs.

    Attributes:
        schedule: Name of the schedule.
        micro_batches: Number of micro-batches of a share.
        chunks: Number of stages on each worker. None: that of the schedule.
        pads: Whether a share of fewer rows has as many micro-batches, as other workers wait for
            each.
        made: Schedules that were made already, by number of micro-batches.
    """

    schedule: str
    micro_batches: int
    chunks: int | None
    pads: bool = False
    made_schedules: dict[int, PipelineSchedule] = field(default_factory=dict)

    def count_micro_batches(self, rows: int) -> int:
        """Count the micro-batches of a share with this number of rows."""
        return self.micro_batches if self.pads else max(1, min(self.micro_batches, rows))

    def get_schedule(self, ranks: int, count: int) -> PipelineSchedule:
        """Get the schedule for a number of micro-batches, which may be fewer in some steps."""
        if count not in self.made_schedules:
            self.made_schedules[count] = make_schedule(self.schedule, ranks, count, self.chunks)
        return self.made_schedules[count]


class PipelinedModel:
    """The stages of `model` that one worker has. It replaces the model's forward.

    From then on the model can be called by its pipeline only.

    Invariants:
        All workers along `stage` make the same calls, in the same order, so `steps` is equal on
        all. `split`, `stages`, `ties`, `_own` and `_elsewhere` never change. Each parameter of the
        model is either in `_own` or, as an empty one, in `_elsewhere`.
        `_active_calls` isn't empty inside of `_enter_stage` only, and then the model can be called.
        Outside of it, the random generators are in the same state on all workers.

    Args:
        model: Model, with the parameters of this worker's stages.
        graph: Layers of the model.
        holding: Parameters that this worker has.
        terms: How the pipeline runs.
        group: Workers along `stage`. Nothing else may use it.
        pairs: Connections between them. Nothing else may use them.
        trained: Finds the parameter that optimizers step in the place of a model's.
        profiler: Measures this worker's actions.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        holding: StageHolding,
        terms: PipelineTerms,
        *,
        group: Group,
        pairs: Pairs,
        trained: Callable[[Parameter], Parameter],
        profiler: PipelineProfiler,
    ) -> None:
        self._model, self._graph, self.terms, self._group, self._pairs, self._trained = (
            model,
            graph,
            terms,
            group,
            pairs,
            trained,
        )
        self._profiler = profiler
        self.split, self.ties, self._own, self._elsewhere = (
            holding.split,
            list(holding.ties),
            holding.own,
            holding.elsewhere,
        )
        split, rank = holding.split, group.rank
        self.stages = {
            stage: _StageOfModel(model, graph, stage, split.layer_range(stage), profiler)
            for stage in split.stages_of_rank(rank)
        }
        self._executor = PipelineExecutor(self.stages, pairs, rank, profiler)
        # For each parameter, in an order that all workers have: whether it is here, and its trained
        # one.
        self._stepped_parameters: list[tuple[bool, Parameter]] | None = None
        profiler.reset_profile()
        # Not empty while the pipeline itself calls the model.
        self._active_calls = list[bool]()
        model.forward = _StageForward(self._active_calls)
        self._zone, self._has_drawn = RandomZone(group.rank), False
        self.steps_made = 0
        # Kinds of calls of a followed model for which all stages know which results they need.
        self._followed_kinds = set[str]()

    def make_profile(self) -> dict[str, Any]:
        """Make plain data of this worker's stages and times, for `record/pipeline_profile.py`."""
        profiler = self._profiler
        return {
            "schedule": self.terms.schedule,
            "chunks": self.terms.chunks,
            "layers": list(self._graph.layers),
            "bounds": list(self.split.bounds),
            "layer_seconds": profiler.layer_seconds,
            "kept": profiler.kept_nbytes,
            "steps": list(profiler.steps),
        }

    @property
    def has_first(self) -> bool:
        """Whether this worker has the first stage."""
        return 0 in self.stages

    def close(self) -> None:
        """Close the connections between the stages."""
        self._pairs.close()

    # ---- a step

    def run_step(
        self,
        share: BatchShare,
        joined: Callable[[], contextlib.AbstractContextManager[JoinablePasses]],
    ) -> float:
        """Go forward and back through all stages. Collective along `stage`.

        Args:
            share: This replica's part of the batch.
            joined: Begins the passes that take the gradients. If gradients are off, it isn't
                called, and there is no backward.

        Returns:
            Mean loss of the share.
        """
        train = torch.is_grad_enabled()
        batches, where = self._begin_step(share, train=train, why="run.step")
        schedule = self.terms.get_schedule(self._group.size, len(batches))
        with self._enter_stage(), contextlib.ExitStack() as around:
            passes = around.enter_context(joined()) if train else None
            if passes is not None:
                # Tied weights get gradients from several stages, so they are exchanged at the end.
                passes.delay_gradients([self._trained(tie.parameter) for tie in self.ties])
            with self._profiler.measure_step(len(batches), train=train):
                done = self._executor.run_schedule(
                    schedule, batches, share.compute_loss, passes, where=where
                )
            if passes is not None and not passes.silent:
                self._sum_ties(passes)
        return self._end_step(done, share, batches, train=train)

    def run_forward(
        self, share: BatchShare, finish: Callable[[Any], Any] = lambda output: output
    ) -> Any:
        """Go forward through all stages. Collective along `stage`.

        Returns `finish` of the model's output for the whole share, on all workers.
        """
        batches, where = self._begin_step(share, train=False, why="run.forward")
        with torch.no_grad(), self._enter_stage():
            done = self._run_forwards(batches, where)
            # Outputs of copies, which have no rows, are left out; but an empty share has one
            # output.
            outputs = [
                output
                for micro_batch, output in sorted(done.outputs.items())
                if batches[micro_batch].rows or not micro_batch
            ]
            own = finish(share.join_outputs(outputs)) if outputs else None
        self._advance_random(drawn=self._model.training)
        return self._broadcast_output(own, where)

    def _run_forwards(self, batches: Sequence[MicroBatch], where: str) -> PipelinePass:
        """Run forwards alone: by gpipe if each worker has one stage, else by the schedule."""
        schedule = (
            make_schedule("gpipe", self._group.size, len(batches))
            if len(set(self.split.placed)) == len(self.split.placed)
            else None
        )
        with self._profiler.measure_step(len(batches), train=False):
            return self._executor.run_schedule(
                schedule or self.terms.get_schedule(self._group.size, len(batches)),
                batches,
                None,
                None,
                where=where,
            )

    def _follow_forward(
        self, graph: FollowedGraph, kind: str, batches: Sequence[MicroBatch], where: str
    ) -> None:
        """Find out which results each stage needs, by a forward that sends all. Collective."""
        outputs = list[Any]()
        # The second forward shows whether the results that were found are enough.
        for recording in (graph.record_uses(), contextlib.nullcontext()):
            with (
                torch.no_grad(),
                preserve_state(self._model),
                self._enter_stage(),
                recording as uses,
            ):
                outputs.append(self._run_forwards(batches, where).outputs)
            # Or the step would find weights there that autocast has cast without gradients.
            torch.clear_autocast_cache()
            if uses is not None:
                records = self._group.gather_bytes(msgpack.packb(uses.rows))
                graph.learn_uses(kind, map(msgpack.unpackb, records), self.split.bounds[:-1])
        if b"-" in self._group.gather_bytes(b"+" if _are_outputs_close(*outputs) else b"-"):
            raise UsageError(
                f"the forward of {type(self._model).__name__} uses what layers have returned in a "
                "way that can't be followed (it may go "
                "through numpy, or lists of numbers): name one layer that holds both ends"
            )
        self._followed_kinds.add(kind)

    def _broadcast_output(self, output: Any, where: str) -> Any:
        """Send the output from the worker of the last stage to all others, on a lane of its own."""
        source, lane = self.split.placed[-1], 2 * len(self.split.placed)
        if self._group.rank == source:
            head, tensors = pack_values({"output": output}, "the model")
            for work in [
                self._pairs.send(rank, lane, head, tensors)
                for rank in range(self._group.size)
                if rank != source
            ]:
                work.wait()
            return output
        message = self._pairs.receive(
            source, lane, what=f"the output of the model in {where}"
        ).wait()
        output_here: Any = unpack_values(message.head, message.tensors)[0]["output"]
        return output_here

    def _begin_step(
        self, share: BatchShare, *, train: bool, why: str
    ) -> tuple[list[MicroBatch], str]:
        """Agree with the other stages on the input, and cut it into micro-batches.

        Raises on all workers if one of them can't go on, or has another batch.
        """
        where = f"{why} {self.steps_made}"
        # An error is held back until all workers are told of it: they would wait for this one.
        wrong, batches, rows, kind = list[PacelineError](), list[MicroBatch](), 0, ""
        try:
            rows = share.rows
            bind = (
                self._graph.bind_inputs
                if self.has_first or isinstance(self._graph, FollowedGraph)
                else None
            )
            batches = cut_batch(share, self.terms.count_micro_batches(rows), bind)
            kind = (
                self._graph.describe_call(batches[0].inputs)
                if isinstance(self._graph, FollowedGraph)
                else kind
            )
        except PacelineError as error:
            wrong.append(error)
        message = msgpack.packb(
            [where, train, rows, kind, str(wrong[0])[:LONGEST_REASON] if wrong else None]
        )
        answers = [msgpack.unpackb(answer) for answer in self._group.gather_bytes(message)]
        if wrong:
            raise wrong[0]
        for rank, (*_, reason) in enumerate(answers):
            if reason is not None:
                raise DataError(f"{why}: rank {self._group.global_rank(rank)}: {reason}")
        for place, what in enumerate(("step", "gradients", "rows", "arguments")):
            values = [answer[place] for answer in answers]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                one, two = self._group.global_rank(0), self._group.global_rank(other)
                raise DataError(
                    f"{why}: ranks {one} and {two} have other stages of the same model, and got "
                    f"different {what} ({values[0]} and "
                    f"{values[other]}): give all workers along `stage` the "
                    "same batch in the same call"
                )
        if isinstance(self._graph, FollowedGraph) and kind not in self._followed_kinds:
            self._follow_forward(self._graph, kind, batches[:1], where)
        self.steps_made += 1
        return batches, where

    def _end_step(
        self, done: PipelinePass, share: BatchShare, batches: Sequence[MicroBatch], *, train: bool
    ) -> float:
        """Tell all stages the loss, and which parameters have gradients."""
        loss = None
        if done.losses:
            loss = math.fsum(
                value * share.loss_weight(batches[micro_batch])
                for micro_batch, value in done.losses.items()
            )
        stepped = self._list_stepped()
        own = (
            bytes(is_own and parameter.grad is not None for is_own, parameter in stepped)
            if train
            else b""
        )
        answers = [
            msgpack.unpackb(answer)
            for answer in self._group.gather_bytes(msgpack.packb([loss, own, self._has_drawn]))
        ]
        self._advance_random(drawn=any(drawn for _, _, drawn in answers))
        if train:
            # An empty piece gets a gradient if the parameter has one elsewhere. So an optimizer
            # keeps the same counts of steps for a parameter on all workers.
            for (is_own, parameter), reached in zip(
                stepped, zip(*(flags for _, flags, _ in answers), strict=True), strict=True
            ):
                if not is_own and any(reached) and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return next(float(value) for value, _, _ in answers if value is not None)

    def _list_stepped(self) -> list[tuple[bool, Parameter]]:
        """List all parameters in one order everywhere: is it here, and which one is trained?"""
        if self._stepped_parameters is None:
            parameters = sorted({**self._own, **self._elsewhere}.items())
            self._stepped_parameters = [
                (name in self._own, self._trained(parameter)) for name, parameter in parameters
            ]
        return self._stepped_parameters

    def _sum_ties(self, passes: JoinablePasses) -> None:
        """Sum the gradients of tied weights over the stages that have them."""
        for tie in self.ties:
            if tie.group is None or not tie.parameter.requires_grad:
                continue
            trained = self._trained(tie.parameter)
            own = passes.accumulated_total(trained)
            # With a gradient on any of them, all of these workers take part in the sum.
            reached = any(
                answer == b"+" for answer in tie.group.gather_bytes(b"-" if own is None else b"+")
            )
            if reached:
                total = torch.zeros_like(trained) if own is None else own
                passes.set_accumulated(
                    trained,
                    tie.group.all_reduce(total, name="tied weights").wait()
                    if total.numel()
                    else total,
                )

    def level_ties(self) -> None:
        """Give all stages with a tied weight the values of the first of them. Collective.

        A strategy between replicas may have rounded each of them differently.
        """
        for tie in self.ties:
            # A worker may have an empty piece of it (shard), and so have all others of the group.
            if tie.group is not None and (values := self._trained(tie.parameter).data).numel():
                tie.group.broadcast(values, root=0, name="tied weights").wait()

    def share_buffers(self, copies: Sequence[nn.Module] = ()) -> None:
        """Give all workers the buffers of all stages, as every state has them. Collective.

        `copies` are copies of the model, whose buffers are shared as well.
        """
        for (stage, place), model in itertools.product(
            enumerate(self.split.placed), (self._model, *copies)
        ):
            for buffer in _iterate_part_buffers(
                model, self._graph.make_part(*self.split.layer_range(stage))
            ):
                self._group.broadcast(buffer, root=place, name="buffers of a stage").wait()

    @contextlib.contextmanager
    def _enter_stage(self) -> Iterator[None]:
        """Let the pipeline call the model, and draw random numbers of its own for each stage."""
        # In training any module may draw numbers, so the zone is always entered.
        zone, self._has_drawn = self._zone if self._model.training else None, False
        if zone is not None:
            zone.enter_zone(self._device)
        self._active_calls.append(True)
        try:
            yield
        finally:
            self._active_calls.pop()
            self._has_drawn = zone is not None and zone.restore_state(self._device)

    def _advance_random(self, *, drawn: bool) -> None:
        """Let the next step draw other numbers, on all workers, if any stage has drawn some."""
        if drawn:
            self._zone.advance_generator(self._device)

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._own.values()), torch.device("cpu"))


class _StageOfModel:
    """One stage, which runs by a call of the model, so that hooks on the model are called."""

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        stage: int,
        layers: tuple[int, int],
        profiler: PipelineProfiler,
    ) -> None:
        part = graph.make_part(*layers)
        owners = graph.find_owners(*layers)
        self._model = model
        self._forward = lambda values: profiler.run_forward(stage, part, owners, model, values)

    def run_stage(self, values: Values) -> Values:
        result: Values = self._model(_StageCall(self._forward, values))
        return result


@dataclass(frozen=True)
class _StageCall:
    """The argument of the model when its pipeline calls it."""

    program: Callable[[Values], Values]
    values: Values


class _StageForward:
    """A model's forward, which runs a stage for its pipeline and refuses all other calls.

    Copies of the model refuse all calls. `inside` isn't empty while the pipeline calls.
    """

    def __init__(self, inside: list[bool], *, copied: bool = False) -> None:
        self._active_calls, self._copied = inside, copied

    def __deepcopy__(self, memo: dict[int, Any]) -> _StageForward:
        return _StageForward([], copied=True)

    def __reduce__(self) -> tuple[type[_StageForward], tuple[list[bool]]]:
        return _StageForward, ([],)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], _StageCall) and self._active_calls:
            return args[0].program(args[0].values)
        if self._copied:
            raise UsageError(
                "this is a copy of a model that has layers on other workers (pipeline), and can't "
                "be called: copy its parameters into the "
                "model that was prepared, as for p, q in zip(model.parameters(), "
                "copied.parameters()): p.data.copy_(q), and call "
                "run.forward(model, x)"
            )
        raise UsageError(
            "this model has layers on other workers (pipeline), "
            "so it can't be called by itself: write "
            "loss = run.step(model, x, y, loss=F.cross_entropy), which goes forward and back, or "
            "run.forward(model, x)"
        )


def _are_outputs_close(one: Any, two: Any) -> bool:
    """Whether two outputs are equal but for rounding, with NaN in the same places."""
    leaves = [
        [x.double() for x in tree_leaves(each) if isinstance(x, Tensor) and x.is_floating_point()]
        for each in (one, two)
    ]
    pairs = [
        (x, y, (x - y).nan_to_num().norm() <= 0.01 * x.nan_to_num().norm())
        for x, y in zip(*leaves, strict=True)
    ]
    return all(bool(near) and torch.equal(x.isnan(), y.isnan()) for x, y, near in pairs)


def _iterate_part_buffers(model: nn.Module, part: StagePart) -> Iterator[Tensor]:
    """Yield the buffers that a part uses."""
    for path in part.modules:
        yield from model.get_submodule(path).buffers()
    for path in part.attributes:
        owner, _, name = path.rpartition(".")
        if name in (module := model.get_submodule(owner))._buffers:
            yield module.get_buffer(name)
