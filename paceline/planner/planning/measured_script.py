"""Measures a script under all conditions that pricing its possible ways needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cluster.machine import count_cores
from paceline.errors import UsageError
from paceline.planner import answer, search
from paceline.planner.answer import Wishes
from paceline.planner.model_profile import ModelProfile, read_profile
from paceline.planner.planned_cluster import PlannedCluster
from paceline.unequal.probe import script_profiler
from paceline.unequal.probe.script_profiler import Condition


def get_profile(
    subject: Path,
    args: Sequence[str],
    cluster: PlannedCluster,
    wishes: Wishes,
    notify: Callable[[str], None],
) -> ModelProfile:
    """Read a profile, or measure a script.

    Args:
        subject: A script (.py), or a profile (.json).
        args: Arguments of the script.
        cluster: The cluster.
        wishes: What the user asks.
        notify: Called with a line for each condition that is measured.

    Raises:
        UsageError: It is neither, or it can't be read or measured.
    """
    if subject.suffix == ".json":
        return read_profile(subject)
    if subject.suffix != ".py":
        raise UsageError(
            f"{subject}: give a training script (.py), a profile of one (.json), or a transformer "
            "by numbers (.toml)"
        )
    if not subject.is_file():
        raise UsageError(f"there is no script {subject}")
    return _measure_script(str(subject), args, cluster, wishes, notify)


def _measure_script(
    script: str,
    args: Sequence[str],
    cluster: PlannedCluster,
    wishes: Wishes,
    notify: Callable[[str], None],
) -> ModelProfile:
    """Measure whole models first. They show how the model can be cut, which is measured then."""
    cores = count_cores()
    # How the model can be cut isn't known yet, so pinned cuts can't be looked for.
    uncut = replace(wishes, mesh=None, cut=None)
    whole = search.find_conditions(answer.list_wished(cluster, uncut), cores)
    micro_parts = () if wishes.wants_whole_models else answer.list_micro_parts(cluster)
    conditions = [Condition(*key, parts, micro_parts) for key, parts in whole.items()]
    for each in conditions:
        notify(f"measuring {each.processes} at once, {each.threads} threads each")
    profile = script_profiler.measure_script(script, args, conditions)
    cuts = replace(profile.possible_cuts, tensor_sizes=profile.tensor_sizes)
    divided = search.find_tensor_conditions(answer.list_wished(cluster, wishes, cuts), cores)
    if not divided:
        return profile
    for size, processes, threads in divided:
        notify(f"measuring {processes} that divide layers by {size}, {threads} threads each")
    workers = script_profiler.measure_tensor_workers(
        script,
        args,
        [Condition(*key[1:], parts, (), key[0]) for key, parts in divided.items()],
    )
    return replace(profile, tensor_workers=workers)
