"""A model whose layers are on several workers, as one of them has it: its stages, and what all of
them do together in a step.

step    all say what they were given          rows, and what is wrong with it
        the schedule                          executor.py
        tied weights                          gradients are summed over the stages that have them
        all say how it ended                  the loss, and which parameters have gradients
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
from torch.utils._pytree import tree_leaves

from paceline.comm.group import Group
from paceline.comm.pairs import Pairs
from paceline.errors import DataError, PacelineError, UsageError
from paceline.parallel.following.graph import FollowedGraph
from paceline.parallel.pipelining.batches import Share, cut_batch
from paceline.parallel.pipelining.chain import LayerGraph, StagePart
from paceline.parallel.pipelining.executor import MicroBatch, Passes, PipelineExecutor, PipelinePass
from paceline.parallel.pipelining.measuring import untouched
from paceline.parallel.pipelining.profiler import PipelineProfiler
from paceline.parallel.pipelining.schedule import PipelineSchedule
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.values import Values, pack, unpack
from paceline.parallel.tensor.random_zone import RandomZone

TOLD = 200  # characters of an error that the others are told


class JoinablePasses(Passes, Protocol):
    """Backward passes of a step, some of whose parameters are exchanged at its end."""

    @property
    def silent(self) -> bool:
        """Whether nothing is exchanged yet at the end of this step."""
        ...

    def delay(self, parameters: Sequence[Tensor]) -> None:
        """Let gradients of these parameters be exchanged at the end of the step alone."""
        ...

    def total(self, parameter: Tensor) -> Tensor | None:
        """Return what the step has added up of a delayed parameter."""
        ...

    def put(self, parameter: Tensor, total: Tensor) -> None:
        """Let `total` be what the step has added up of a delayed parameter."""
        ...

    def close(self) -> None:
        """Exchange what the step has reached."""
        ...


@dataclass(frozen=True)
class StageSplit:
    """Which layers are where.

    `bounds`: the first layer of each stage, and the end; `placed`: the place along `stage` that has
    each.
    """

    bounds: tuple[int, ...]
    placed: tuple[int, ...]

    def held(self, rank: int) -> list[int]:
        """Return the stages of one worker."""
        return [stage for stage, place in enumerate(self.placed) if place == rank]

    def range(self, stage: int) -> tuple[int, int]:
        """Return the first layer of a stage, and the first after it."""
        return self.bounds[stage], self.bounds[stage + 1]


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages use.

    `group`: the workers that have them, where these are several.
    """

    parameter: Parameter
    group: Group | None


@dataclass(frozen=True)
class StageHolding:
    """What one worker has under a split: `mine`, by name, and `elsewhere`, what stands for the
    parameters of other stages.
    """

    split: StageSplit
    ties: tuple[SharedParameter, ...]
    mine: Mapping[str, Parameter]
    elsewhere: Mapping[str, Parameter]


@dataclass
class PipelineTerms:
    """How a pipeline runs: the schedule's name, how many micro-batches a batch is cut into, and
    stages on each worker.
    """

    schedule: str
    micro_batches: int
    chunks: int | None
    # a share of fewer rows has as many micro-batches, as others wait for this worker in each of
    # them
    pads: bool = False
    made: dict[int, PipelineSchedule] = field(default_factory=dict)

    def count(self, rows: int) -> int:
        """Return the number of micro-batches of a share of so many rows."""
        return self.micro_batches if self.pads else max(1, min(self.micro_batches, rows))

    def of(self, ranks: int, count: int) -> PipelineSchedule:
        """Return the schedule for so many micro-batches, which may be fewer than in other steps."""
        if count not in self.made:
            self.made[count] = make_schedule(self.schedule, ranks, count, self.chunks)
        return self.made[count]


class PipelinedModel:
    """The stages that one worker has of `model`, whose forward runs them from now on, and refuses
    all other calls.

    `holding`: what it has. `group` and `pairs` join the workers along
    `stage`, and nothing else uses them. `trained` says what is trained in the place of a parameter.
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
        self.split, self.ties, self._mine, self._elsewhere = (
            holding.split,
            list(holding.ties),
            holding.mine,
            holding.elsewhere,
        )
        split, rank = holding.split, group.rank
        self.stages = {
            stage: _StageOfModel(model, graph, stage, split.range(stage), profiler)
            for stage in split.held(rank)
        }
        self._executor = PipelineExecutor(self.stages, pairs, rank, profiler)
        self._stepped: list[tuple[bool, Parameter]] | None = None
        profiler.begin()
        self._inside = list[bool]()
        model.forward = _StageForward(self._inside)
        self._zone, self._drawn = RandomZone(group.rank), False
        self.steps = 0
        # kinds of calls of a model that isn't traced, for which it is known what stages need of
        # each other
        self._followed = set[str]()

    def profile(self) -> dict[str, Any]:
        """Return what was measured of this worker's stages, and what they are, as plain data,
        for `record/pipeline_profile.py`.
        """
        profiler = self._profiler
        return {
            "schedule": self.terms.schedule,
            "chunks": self.terms.chunks,
            "layers": list(self._graph.layers),
            "bounds": list(self.split.bounds),
            "layer_seconds": profiler.layer_seconds,
            "kept": profiler.kept,
            "steps": list(profiler.steps),
        }

    @property
    def has_first(self) -> bool:
        """Whether this worker has the first stage."""
        return 0 in self.stages

    def close(self) -> None:
        """Free what the stages are joined by."""
        self._pairs.close()

    # ---- a step

    def step(
        self, share: Share, joined: Callable[[], contextlib.AbstractContextManager[JoinablePasses]]
    ) -> float:
        """Go forward and back through all stages, and return the mean loss of this replica's part
        of the batch. Collective along `stage`.

        `joined` begins what takes the gradients; nothing goes back where gradients are off.
        """
        train = torch.is_grad_enabled()
        batches, where = self._begin(share, train=train, why="run.step")
        schedule = self.terms.of(self._group.size, len(batches))
        with self._alone(), contextlib.ExitStack() as around:
            passes = around.enter_context(joined()) if train else None
            if passes is not None:
                passes.delay([self._trained(tie.parameter) for tie in self.ties])
            with self._profiler.step(len(batches), train=train):
                done = self._executor.run(schedule, batches, share.criterion, passes, where=where)
            if passes is not None and not passes.silent:
                self._sum_ties(passes)
        return self._end(done, share, batches, train=train)

    def forward(self, share: Share, finish: Callable[[Any], Any] = lambda output: output) -> Any:
        """Go forward through all stages, and return `finish` of the model's output for the whole
        batch. Collective along `stage`.
        """
        batches, where = self._begin(share, train=False, why="run.forward")
        with torch.no_grad(), self._alone():
            done = self._go_forward(batches, where)
            outputs = [
                output
                for number, output in sorted(done.outputs.items())
                if batches[number].rows or not number
            ]
            own = finish(share.whole(outputs)) if outputs else None
        self._move_on(drawn=self._model.training)
        return self._tell(own, where)

    def _go_forward(self, batches: Sequence[MicroBatch], where: str) -> PipelinePass:
        schedule = (
            make_schedule("gpipe", self._group.size, len(batches))
            if len(set(self.split.placed)) == len(self.split.placed)
            else None
        )
        with self._profiler.step(len(batches), train=False):
            return self._executor.run(
                schedule or self.terms.of(self._group.size, len(batches)),
                batches,
                None,
                None,
                where=where,
            )

    def _follow(
        self, graph: FollowedGraph, kind: str, batches: Sequence[MicroBatch], where: str
    ) -> None:
        """Find out what each stage needs of others, by a forward in which they give each other
        everything. Collective.
        """
        outputs = list[Any]()
        # the second shows whether what was found is all
        for recording in (graph.recording(), contextlib.nullcontext()):
            with torch.no_grad(), untouched(self._model), self._alone(), recording as uses:
                outputs.append(self._go_forward(batches, where).outputs)
            # else the step would find weights there that were cast without gradients
            torch.clear_autocast_cache()
            if uses is not None:
                told = self._group.agree(msgpack.packb(uses.plain))
                graph.learn(kind, map(msgpack.unpackb, told), self.split.bounds[:-1])
        if b"-" in self._group.agree(b"+" if _alike(*outputs) else b"-"):
            raise UsageError(
                f"the forward of {type(self._model).__name__} uses what layers have returned in a "
                "way that can't be followed (it may go "
                "through numpy, or lists of numbers): name one layer that holds both ends"
            )
        self._followed.add(kind)

    def _tell(self, output: Any, where: str) -> Any:
        """Send the output from the worker of the last stage to all others."""
        source, lane = self.split.placed[-1], 2 * len(self.split.placed)
        if self._group.rank == source:
            head, tensors = pack({"output": output}, "the model")
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
        found: Any = unpack(message.head, message.tensors)[0]["output"]
        return found

    def _begin(self, share: Share, *, train: bool, why: str) -> tuple[list[MicroBatch], str]:
        """Agree with the other stages on what was given.

        Raises on all of them, where one can't go on or has another batch.
        """
        where = f"{why} {self.steps}"
        wrong, batches, rows, kind = list[PacelineError](), list[MicroBatch](), 0, ""
        try:
            rows = share.rows
            bind = (
                self._graph.bind
                if self.has_first or isinstance(self._graph, FollowedGraph)
                else None
            )
            batches = cut_batch(share, self.terms.count(rows), bind)
            kind = (
                self._graph.kind(batches[0].inputs)
                if isinstance(self._graph, FollowedGraph)
                else kind
            )
        except PacelineError as error:
            wrong.append(error)
        told = msgpack.packb([where, train, rows, kind, str(wrong[0])[:TOLD] if wrong else None])
        answers = [msgpack.unpackb(answer) for answer in self._group.agree(told)]
        if wrong:
            raise wrong[0]
        for rank, (*_, told_by) in enumerate(answers):
            if told_by is not None:
                raise DataError(f"{why}: rank {self._group.global_rank(rank)}: {told_by}")
        for place, what in enumerate(("step", "gradients", "rows", "arguments")):
            found = [answer[place] for answer in answers]
            other = next((rank for rank, value in enumerate(found) if value != found[0]), None)
            if other is not None:
                one, two = self._group.global_rank(0), self._group.global_rank(other)
                raise DataError(
                    f"{why}: ranks {one} and {two} have other stages of the same model, and got "
                    f"different {what} ({found[0]} and "
                    f"{found[other]}): give all workers along `stage` the same batch in the same "
                    "call"
                )
        if isinstance(self._graph, FollowedGraph) and kind not in self._followed:
            self._follow(self._graph, kind, batches[:1], where)
        self.steps += 1
        return batches, where

    def _end(
        self, done: PipelinePass, share: Share, batches: Sequence[MicroBatch], *, train: bool
    ) -> float:
        """Tell all stages the loss, and which parameters were reached.

        Optimizers keep the same of a parameter, wherever it is.
        """
        loss = None
        if done.losses:
            loss = math.fsum(
                value * share.worth(batches[number]) for number, value in done.losses.items()
            )
        stepped = self._all_stepped()
        mine = bytes(there and here.grad is not None for there, here in stepped) if train else b""
        answers = [
            msgpack.unpackb(answer)
            for answer in self._group.agree(msgpack.packb([loss, mine, self._drawn]))
        ]
        self._move_on(drawn=any(drawn for _, _, drawn in answers))
        if train:
            for (there, here), reached in zip(
                stepped, zip(*(found for _, found, _ in answers), strict=True), strict=True
            ):
                if not there and any(reached) and here.grad is None:
                    here.grad = torch.zeros_like(here)
        return next(float(value) for value, _, _ in answers if value is not None)

    def _all_stepped(self) -> list[tuple[bool, Parameter]]:
        """Return whether this worker has each parameter, and what optimizers step of it here, in
        an order that all workers have.
        """
        if self._stepped is None:
            known = sorted({**self._mine, **self._elsewhere}.items())
            self._stepped = [
                (name in self._mine, self._trained(parameter)) for name, parameter in known
            ]
        return self._stepped

    def _sum_ties(self, passes: JoinablePasses) -> None:
        """Sum the gradients of tied weights over the stages that have them."""
        for tie in self.ties:
            if tie.group is None or not tie.parameter.requires_grad:
                continue
            trained = self._trained(tie.parameter)
            mine = passes.total(trained)
            reached = any(
                answer == b"+" for answer in tie.group.agree(b"-" if mine is None else b"+")
            )
            if reached:
                total = torch.zeros_like(trained) if mine is None else mine
                passes.put(
                    trained,
                    tie.group.all_reduce(total, name="tied weights").wait()
                    if total.numel()
                    else total,
                )

    def level_ties(self) -> None:
        """Give all stages that have a tied weight the values of the first of them, as a strategy
        has rounded each by itself. Collective.
        """
        for tie in self.ties:
            # of some, workers have no piece
            if tie.group is not None and (values := self._trained(tie.parameter).data).numel():
                tie.group.broadcast(values, root=0, name="tied weights").wait()

    def share_buffers(self, copies: Sequence[nn.Module] = ()) -> None:
        """Give all workers the buffers of all stages, of copies of the model too, as a state has
        them all. Collective along `stage`.
        """
        for (stage, place), model in itertools.product(
            enumerate(self.split.placed), (self._model, *copies)
        ):
            for buffer in _buffers(model, self._graph.part(*self.split.range(stage))):
                self._group.broadcast(buffer, root=place, name="buffers of a stage").wait()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let the model be called by the executor, and draw random numbers of this stage's own."""
        # a forward may draw whatever its modules are
        zone, self._drawn = self._zone if self._model.training else None, False
        if zone is not None:
            zone.enter(self._device)
        self._inside.append(True)
        try:
            yield
        finally:
            self._inside.pop()
            self._drawn = zone is not None and zone.back(self._device)

    def _move_on(self, *, drawn: bool) -> None:
        """Let the next step draw other numbers, if some stage has `drawn` any: generators are in
        the same state on all workers.
        """
        if drawn:
            self._zone.move_on(self._device)

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._mine.values()), torch.device("cpu"))


class _StageOfModel:
    """One stage, which is run by a call of the model: so that hooks on the model, such as those
    of a cut inside, see it.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        stage: int,
        layers: tuple[int, int],
        profiler: PipelineProfiler,
    ) -> None:
        part = graph.part(*layers)
        owners = graph.owners(*layers)
        self._model = model
        self._forward = lambda values: profiler.forward(stage, part, owners, model, values)

    def run(self, values: Values) -> Values:
        found: Values = self._model(_StageCall(self._forward, values))
        return found


@dataclass(frozen=True)
class _StageCall:
    """What the model is called with by its pipeline."""

    program: Callable[[Values], Values]
    values: Values


class _StageForward:
    """The forward of a model, which runs one of its parts for its pipeline and refuses all other
    calls; those of copies, too.
    """

    def __init__(self, inside: list[bool], *, copied: bool = False) -> None:
        # something is in the list while the pipeline calls
        self._inside, self._copied = inside, copied

    def __deepcopy__(self, memo: dict[int, Any]) -> _StageForward:
        return _StageForward([], copied=True)

    def __reduce__(self) -> tuple[type[_StageForward], tuple[list[bool]]]:
        return _StageForward, ([],)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], _StageCall) and self._inside:
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
            "this model has layers on other workers (pipeline), so it can't be called by itself: "
            "write "
            "loss = run.step(model, x, y, loss=F.cross_entropy), which goes forward and back, or "
            "run.forward(model, x)"
        )


def _alike(one: Any, two: Any) -> bool:
    """Whether two outputs are the same but for rounding: what stands in for values that didn't
    come is no number.
    """
    found = [
        [x.double() for x in tree_leaves(each) if isinstance(x, Tensor) and x.is_floating_point()]
        for each in (one, two)
    ]
    pairs = [
        (x, y, (x - y).nan_to_num().norm() <= 0.01 * x.nan_to_num().norm())
        for x, y in zip(*found, strict=True)
    ]
    return all(bool(near) and torch.equal(x.isnan(), y.isnan()) for x, y, near in pairs)


def _buffers(model: nn.Module, part: StagePart) -> Iterator[Tensor]:
    """Yield the buffers that a part uses."""
    for path in part.modules:
        yield from model.get_submodule(path).buffers()
    for path in part.attributes:
        owner, _, name = path.rpartition(".")
        if name in (module := model.get_submodule(owner))._buffers:
            yield module.get_buffer(name)
