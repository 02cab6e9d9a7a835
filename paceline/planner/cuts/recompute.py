"""Activation checkpoints: seconds of computing layers again, and the memory that this saves.

    without   forward keeps a b c d                             backward
    with      forward keeps the inputs of layers      (a) b (c) d      one layer's are there at once

Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""

from __future__ import annotations

from dataclasses import replace

from paceline.planner.cuts.layer_profile import predict_layers
from paceline.planner.model_profile import MeasuredCondition, ModelProfile, StepTimes


def recompute_step(
    profile: ModelProfile,
    condition: MeasuredCondition,
    times: StepTimes,
    samples: float,
    speed: float = 1.0,
) -> StepTimes:
    """Change a step of a whole model into one with activation checkpoints.

    Args:
        profile: What was measured of the script.
        condition: Condition that the step was measured under.
        times: The step, without checkpoints.
        samples: Samples of the step.
        speed: How much faster the worker is than the one that was measured. Default: 1.
    """
    layers = [
        cost
        for cost in predict_layers(condition.layers, samples)
        if cost.name in profile.checkpointed.names
    ]
    part = samples / profile.global_batch
    return replace(
        times,
        backward=times.backward + sum(cost.forward_seconds for cost in layers) / speed,
        activation_bytes=times.activation_bytes
        - profile.checkpointed.saved_bytes * part
        + max((cost.kept for cost in layers), default=0),
    )


def share_of_checkpoints(profile: ModelProfile, condition: MeasuredCondition) -> float:
    """Part of the forward that activation checkpoints compute again, from 0 to 1."""
    costs = condition.layers[-1].costs
    again = sum(cost.forward_seconds for cost in costs if cost.name in profile.checkpointed.names)
    return again / sum(cost.forward_seconds for cost in costs)
