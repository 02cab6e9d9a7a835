"""Measures training steps of one process for `paceline plan`, in place of training.

    steps   0 1 2 | 3 4 5 6 ... | ...           | ...
            start | whole batch | half of it    | and so on: phases of equal numbers of samples

A phase begins with steps that aren't measured. Other processes may measure at the same time, on
other copies of the script: all wait for each other before the first phase.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.cluster.discover import Place
from paceline.cluster.machine import count_cores, identify_boot
from paceline.comm.axis_groups import AxisGroups
from paceline.data.loader import ShareLoader
from paceline.errors import UsageError
from paceline.loop.observers import LoopObservers
from paceline.parallel.containers import tree_leaves
from paceline.planner.cuts.layer_profile import CheckpointedLayers, LayerSteps
from paceline.planner.model_profile import (
    TIMED_PARTS,
    GradientProfile,
    MeasuredCondition,
    ModelProfile,
    StepTimes,
    format_profile,
)
from paceline.prepare.registry import Prepared
from paceline.record.held_memory import (
    peak_nbytes,
    predict_optimizer_nbytes,
    predict_parameters,
    tensor_nbytes,
)
from paceline.unequal.probe.compute import (
    choose_matrix_length,
    make_copy_pair,
    measure_copies,
    measure_products,
)
from paceline.unequal.probe.model_call import ModelCall, cut_rows

FIRST_STEPS: Final = 3  # steps before the first phase: the first ones allocate memory
SKIPPED_STEPS: Final = 1  # first steps of a phase
MIN_STEPS, MAX_STEPS = 4, 40  # measured steps of a phase
TENSOR_STEPS: Final = 8  # measured steps of a phase if workers divide layers
PHASE_SECONDS: Final = 1.2  # seconds of a phase, unless its fewest steps take longer
MEETING_SECONDS: Final = 120.0  # seconds in which the other processes have to come
PRODUCT_SECONDS: Final = 0.3  # seconds of the products of matrices, and of the copies


@dataclass(frozen=True)
class ProfileRequest:
    """What a process is asked to measure: the content of the file that PACELINE_PROFILE names.

    Attributes:
        script: The script, as the user named it.
        folder: Folder for the result, and for the files by which processes meet.
        index: Number of this process.
        processes: Number of processes that measure at the same time.
        parts: Parts of the global batch: 4 is a quarter of its samples. The first is measured
            first.
        micro_parts: Parts for micro-batches, with which layers are measured one by one.
        tensor: Workers that divide the layers: this process, and others of a run.
    """

    script: str
    folder: str
    index: int
    processes: int
    parts: tuple[float, ...]
    micro_parts: tuple[float, ...] = ()
    tensor: int = 1

    @classmethod
    def read(cls, path: Path) -> ProfileRequest:
        """Read the file."""
        content = json.loads(path.read_text())
        lists = {name: tuple(content[name]) for name in ("parts", "micro_parts")}
        return cls(**{**content, **lists})

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(asdict(self)))

    def result_file(self) -> Path:
        """File that gets the profile of this process."""
        return Path(self.folder) / f"profile-{self.index}.json"


@dataclass
class _Moments:
    """When the parts of the step under way began or ended, in seconds."""

    ended: float = 0.0  # of the step before
    batch: float = 0.0
    forward: float = 0.0
    last_gradient: float = 0.0
    optimizer_began: float = 0.0
    optimizer: float = 0.0  # seconds of all optimizer steps
    exchanged: float = 0.0  # seconds of exchanges along `tensor` before this step
    sent: float = 0.0  # bytes sent along it before this step


@dataclass
class _Phase:
    """The steps of one number of samples, and the bytes that autograd kept in one of them."""

    samples: int
    activation_bytes: int = 0
    steps: list[StepTimes] = field(default_factory=list)
    skipped: int = 0
    began: float = 0.0


class Meters:
    """What this worker has exchanged so far along axes of the mesh."""

    def __init__(self, groups: AxisGroups) -> None:
        self._groups = groups

    @property
    def seconds(self) -> float:
        """Seconds in which it stood still."""
        return sum(meter.seconds for meter in self._groups.meters)

    @property
    def nbytes(self) -> float:
        """Bytes that it has sent."""
        return sum(sum(meter.traffic.as_pair) for meter in self._groups.meters)


class StepProfiler:
    """Measures steps, writes the profile of this process, and ends the script.

    It follows the loop as an observer, models and optimizers by torch's own hooks, and replaces
    each batch by its first samples.
    """

    def __init__(self, prepared: Prepared, request: ProfileRequest, meters: Meters) -> None:
        self._prepared, self._request, self._meters = prepared, request, meters
        self._loader: ShareLoader | None = None
        self._now = _Moments()
        self._steps = 0
        self._global_batch = 0
        self._phases: list[_Phase] = []
        self._phase: _Phase | None = None
        # Moments of gradients by parameter, as fractions of backward, in the order of the last
        # measured step of the whole batch.
        self._arrivals: dict[int, float] = {}
        self._fractions: dict[int, float] = {}
        # While a step's activations are measured: the bytes of each storage that autograd keeps.
        self._kept: dict[int, int] = {}
        self._keeping = ExitStack()
        self._parameter_storages: set[int] = set()
        # Of the process: when training begins, and at most in the steps before the first phase.
        self._base_bytes = self._peak_bytes = 0
        self._flops = self._copied = self._attended = 0.0
        # The last call of the model, until layers are measured, and what was measured then.
        self._call: ModelCall | None = None
        self._takes_steps = False
        self._layers: tuple[LayerSteps, ...] = ()
        self._tensor_sizes: tuple[int, ...] = ()
        self._checkpointed = CheckpointedLayers()

    # ---- observers of the loop

    def begin_training(self, loader: ShareLoader) -> None:
        """Follow the loader, the models and the optimizers."""
        prepared = self._prepared
        if prepared.cuts.applied and self._request.tensor == 1:
            raise UsageError("paceline plan measures whole models: leave --mesh and --cut out")
        models = [model for _, model in prepared.models]
        devices = {parameter.device.type for model in models for parameter in model.parameters()}
        if devices - {"cpu"}:
            raise UsageError(
                f"paceline plan measures scripts on the CPU, and this one trains on "
                f"{', '.join(sorted(devices))}: describe a transformer by numbers instead"
            )
        assert loader.turn is not None
        self._loader, self._global_batch = loader, loader.turn.global_batch
        self._parameter_storages = {
            parameter.untyped_storage().data_ptr()
            for _, model in prepared.models
            for parameter in model.parameters()
        }
        loader.terms.change_batches(self._take_samples)
        for _, model in prepared.models:
            model.register_forward_pre_hook(self._note_call, with_kwargs=True)
            model.register_forward_hook(self._note_forward)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note_gradient)
        self._base_bytes = _read_resident_bytes()
        self._now.ended = time.perf_counter()

    def note_model_step(
        self, model: nn.Module, given: tuple[Any, ...], loss: Callable[..., Tensor]
    ) -> None:
        """Note that the script calls `run.step`, and with which loss."""
        self._takes_steps = True
        if self._phase is None and self._request.micro_parts:
            self._call = ModelCall(model, loss=loss, target=given[-1])

    def note_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the optimizers, all of which are known now."""
        for each in {id(each): each for each in self._prepared.optimizers}.values():
            each.register_step_pre_hook(self._note_optimizer_begin)
            each.register_step_post_hook(self._note_optimizer_end)

    def end_step(self, steps: int, samples: int, seconds: Mapping[str, float]) -> None:
        """End a step: it counts for the phase, or the next phase begins."""
        ended, now, loader = time.perf_counter(), self._now, self._loader
        assert loader is not None and loader.turn is not None
        self._steps += 1
        if samples != self._global_batch:
            pass  # the last batch of an epoch is smaller
        elif self._phase is None:
            if self._steps >= FIRST_STEPS:
                self._begin_measuring()
        elif self._phase.skipped < SKIPPED_STEPS:
            self._phase.skipped += 1
            self._phase.began = ended
        else:
            self._record_step(self._phase, ended)
        # A small data set ends before all is measured: its last whole batch comes again.
        if loader.length is not None and loader.turn.index + 2 >= loader.length:
            loader.repeat_turn()
        now.optimizer = now.last_gradient = 0.0
        now.exchanged, now.sent = self._meters.seconds, self._meters.nbytes
        self._arrivals.clear()
        now.ended = time.perf_counter()

    # ---- hooks

    def _take_samples(self, batch: Any) -> Any:
        """Copy the first samples of a batch: autograd would keep the whole batch of a view."""
        phase, whole = self._phase, self._global_batch
        # The skipped step of a phase shows what autograd keeps.
        if phase is not None and phase.skipped < SKIPPED_STEPS:
            self._begin_keeping()
        wanted = whole if phase is None else phase.samples
        self._now.batch = time.perf_counter()
        if wanted == whole:
            return batch
        cut = cut_rows(batch, wanted, whole)
        if not any(
            isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == wanted
            for leaf in tree_leaves(cut)
        ):
            raise UsageError(
                f"paceline plan can't take {wanted} of the {whole} samples of a batch: "
                "no tensor in it has a row for each sample"
            )
        self._now.batch = time.perf_counter()
        return cut

    def _note_call(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Note what the model is called with, until its layers are measured."""
        if self._phase is None and self._request.micro_parts:
            call = self._call or ModelCall(model)
            self._call = replace(call, model=model, args=args, kwargs=kwargs)

    def _note_forward(self, *_: Any) -> None:
        self._now.forward = time.perf_counter()

    def _begin_keeping(self) -> None:
        """Count the memory that autograd keeps from here to the first gradient."""
        self._kept.clear()
        self._keeping = ExitStack()
        self._keeping.enter_context(saved_tensors_hooks(self._keep, lambda kept: kept))

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameter_storages:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def _end_keeping(self) -> None:
        self._keeping.close()
        if self._phase is not None:
            self._phase.activation_bytes = sum(self._kept.values())
        self._kept.clear()

    def _note_gradient(self, parameter: Tensor) -> None:
        if self._kept:
            self._end_keeping()
        self._now.last_gradient = self._arrivals[id(parameter)] = time.perf_counter()

    def _note_optimizer_begin(self, *_: Any) -> None:
        self._now.optimizer_began = time.perf_counter()

    def _note_optimizer_end(self, *_: Any) -> None:
        self._now.optimizer += time.perf_counter() - self._now.optimizer_began

    # ---- phases

    def _begin_measuring(self) -> None:
        """Meet the other processes, measure this one's speed, and begin the first phase."""
        # Steps with the whole batch are done, and nothing was measured yet that needs memory.
        self._peak_bytes = peak_nbytes()
        request, batch = self._request, self._global_batch
        counts = {max(1, math.ceil(batch / part)) for part in request.parts}
        self._phases = [_Phase(count) for count in sorted(counts, reverse=True)]
        _meet_processes(request, "ready")
        device = torch.device("cpu")
        length = choose_matrix_length(device, "float32")
        speed, attended = measure_products(device, "float32", length, PRODUCT_SECONDS)
        self._flops, self._attended = speed.flops, attended / torch.get_num_threads()
        self._copied = measure_copies(make_copy_pair(device), PRODUCT_SECONDS)
        if self._call is not None and len(self._prepared.models) == 1:
            self._measure_cuts(self._call)
        self._call = None
        _meet_processes(request, "measured")
        self._phase = self._phases[0]

    def _measure_cuts(self, call: ModelCall) -> None:
        """Measure the layers, and find how they can be divided."""
        # It imports torch's compiler, which scripts that only train do without.
        from paceline.unequal.probe import layer_measuring as measuring

        batch = self._global_batch
        self._tensor_sizes = measuring.find_tensor_sizes(call.model)
        graph = measuring.find_layer_graph(call.model)
        if graph is None:
            return
        samples = [math.ceil(batch / part) for part in self._request.micro_parts]
        self._layers = measuring.measure_micro_batches(graph, call, samples, batch)
        if self._layers:
            self._checkpointed = measuring.measure_checkpoints(call, self._layers)

    def _record_step(self, phase: _Phase, ended: float) -> None:
        now = self._now
        if not now.last_gradient or now.forward < now.batch:
            raise UsageError(
                "paceline plan found a step without a forward and a backward of the prepared "
                "model: it measures loops in which each batch is trained on"
            )
        backward = now.last_gradient - now.forward
        rest = ended - now.last_gradient - now.optimizer
        phase.steps.append(
            StepTimes(
                phase.samples,
                now.batch - now.ended,
                now.forward - now.batch,
                backward,
                now.optimizer,
                max(rest, 0.0),
                exchange=self._meters.seconds - now.exchanged,
                exchanged_bytes=self._meters.nbytes - now.sent,
            )
        )
        if phase is self._phases[0]:
            self._fractions = {
                key: min(max((moment - now.forward) / backward, 0.0), 1.0)
                for key, moment in self._arrivals.items()
            }
        took = ended - phase.began
        # Workers that divide layers have to take the same number of steps.
        if self._request.tensor > 1:
            done = len(phase.steps) >= TENSOR_STEPS
        else:
            done = len(phase.steps) >= MIN_STEPS and took >= PHASE_SECONDS
        if done or len(phase.steps) >= MAX_STEPS:
            self._end_phase()

    def _end_phase(self) -> None:
        """Go on with the next phase; after the last one write the profile and end the script."""
        at = self._phases.index(self._phase) + 1 if self._phase is not None else 0
        if at < len(self._phases):
            self._phase = self._phases[at]
            return
        # Until all have measured, the others' times would be those of an idler machine.
        self._write_profile()
        _meet_processes(self._request, "done")
        raise SystemExit(0)

    def _write_profile(self) -> None:
        request = self._request
        measured = tuple(_summarize_phase(phase) for phase in reversed(self._phases))
        threads = torch.get_num_threads()
        condition = MeasuredCondition(
            request.processes,
            threads,
            self._flops,
            self._copied,
            self._attended,
            measured,
            self._layers,
        )
        totals, parameters = self._describe_parameters()
        gradients = tuple(
            GradientProfile(parameters[key].numel(), _name_dtype(parameters[key]), moment)
            for key, moment in self._fractions.items()
            if key in parameters
        )
        profile = ModelProfile(
            request.script,
            identify_boot(),
            count_cores(),
            self._global_batch,
            gradients,
            totals,
            self._base_bytes - totals[0],
            self._peak_bytes,
            (condition,),
            self._takes_steps,
            self._tensor_sizes,
            (),
            self._checkpointed,
        )
        request.result_file().write_text(format_profile(profile))

    def _describe_parameters(self) -> tuple[tuple[int, int, int], dict[int, Tensor]]:
        """Sum up the bytes of the states, and list the parameters by their ids."""
        totals, parameters = [0, 0, 0], dict[int, Tensor]()
        for _, parameter, held in predict_parameters(self._prepared, predict_optimizer_nbytes):
            parameters[id(parameter)] = parameter
            for index, kind in enumerate(("parameters", "gradients", "optimizer")):
                totals[index] += held[kind] or 0
        for _, model in self._prepared.models:
            totals[0] += sum(map(tensor_nbytes, model.buffers()))
        return (totals[0], totals[1], totals[2]), parameters


def _summarize_phase(phase: _Phase) -> StepTimes:
    """Take the medians of the parts, so that they add up to about the median of the steps."""
    seconds = [step.seconds for step in phase.steps]
    low, _, high = statistics.quantiles(seconds, n=4)
    names = (*TIMED_PARTS, "exchanged_bytes")
    medians = {
        name: statistics.median(getattr(step, name) for step in phase.steps) for name in names
    }
    spread = (high - low) / statistics.median(seconds)
    return StepTimes(
        phase.samples, **medians, spread=spread, activation_bytes=phase.activation_bytes
    )


def _read_resident_bytes() -> int:
    """Read the memory of this process that is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _name_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _meet_processes(request: ProfileRequest, moment: str) -> None:
    """Wait until all processes have come to this moment. Each shows it by a file."""
    if request.processes == 1:
        return
    folder, limit = Path(request.folder), time.monotonic() + MEETING_SECONDS
    (folder / f"{moment}-{request.index}").touch()
    while any(not (folder / f"{moment}-{index}").exists() for index in range(request.processes)):
        if time.monotonic() > limit:
            raise UsageError(
                f"paceline plan: another copy of the script hasn't come to its loop within "
                f"{MEETING_SECONDS:g} s"
            )
        time.sleep(0.005)


def make_profiler_observers(prepared: Prepared, place: Place, groups: AxisGroups) -> LoopObservers:
    """Make the observers of a run that is only measured; none for a run that trains.

    Args:
        prepared: What the script gives to `run.prepare`.
        place: Place of this process among those that divide layers, with the file of the request.
        groups: The groups of the run, which measure exchanges.
    """
    if place.profile is None:
        return LoopObservers()
    request = ProfileRequest.read(Path(place.profile))
    own = replace(request, index=request.index + place.rank)
    profiler = StepProfiler(prepared, own, Meters(groups))
    return LoopObservers(
        lead_taken=(profiler.begin_training,),
        model_stepped=(profiler.note_model_step,),
        first_step=(profiler.note_first_step,),
        step_ended=(profiler.end_step,),
    )
