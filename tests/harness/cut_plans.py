"""Profiles of models that can be cut, for tests of the planner, without any measurement."""

from __future__ import annotations

from dataclasses import replace

from paceline.parallel.pipelining.split import LayerCost
from paceline.planner.cuts.layer_profile import CheckpointedLayers, LayerSteps
from paceline.planner.model_profile import MeasuredCondition, ModelProfile, TensorWorker
from tests.harness.plans import BATCH, make_condition, make_profile

LAYERS = 4
SAMPLE_SECONDS = 0.001  # of the whole model, forward and backward


def make_layers(samples: int, *, kept: int = 200, sends: int = 50) -> LayerSteps:
    """Make equal layers, which take as long as the steps of `make_condition` together."""
    seconds = SAMPLE_SECONDS * samples / LAYERS
    nbytes = 4 * 1_000_000 // LAYERS
    return LayerSteps(
        samples,
        tuple(
            LayerCost(
                f"blocks.{index}",
                seconds / 3,
                seconds * 2 / 3,
                nbytes,
                nbytes,
                kept * samples,
                sends * samples,
                sends * samples,
            )
            for index in range(LAYERS)
        ),
    )


def make_cut_condition(processes: int = 1, threads: int = 1) -> MeasuredCondition:
    """Make a condition in which nothing is fixed, with layers of two sizes of micro-batches."""
    condition = make_condition(processes, threads, fixed=0.0)
    return replace(condition, layers=(make_layers(4), make_layers(16)))


def make_cut_profile(*, tensor: bool = True) -> ModelProfile:
    """Make a profile of a model that 2 workers can divide, or that a pipeline can deal."""
    conditions = (make_cut_condition(), make_cut_condition(2))
    profile = replace(
        make_profile(conditions),
        takes_steps=True,
        tensor_sizes=(2,),
        checkpointed=CheckpointedLayers(("blocks.0", "blocks.1", "blocks.2"), 450 * BATCH),
    )
    if not tensor:
        return profile
    # Half of the computing, and an exchange.
    divided = make_condition(2, fixed=0.0, each=SAMPLE_SECONDS / 2, optimizer=0.001)
    steps = tuple(
        replace(
            step,
            backward=step.backward + 0.002,
            exchange=0.002,
            exchanged_bytes=1000.0 * step.samples,
            activation_bytes=step.activation_bytes / 2,
        )
        for step in divided.steps
    )
    worker = replace(make_profile((replace(divided, steps=steps),), numel=50_000), tensor_sizes=())
    return replace(profile, tensor_workers=(TensorWorker(2, worker),))
