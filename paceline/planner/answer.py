"""The answer of `paceline plan`: all ways priced, the best of them, and the words for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError
from paceline.formatting import format_bytes
from paceline.planner import explain, search
from paceline.planner.candidates import (
    STAGE_MICRO_BATCHES,
    WHOLE,
    Candidate,
    list_candidates,
)
from paceline.planner.cuts.layer_profile import shorten_names
from paceline.planner.model_profile import ModelProfile, PossibleCuts
from paceline.planner.pins import pin_way
from paceline.planner.plan_file import PlanFile, write_plan
from paceline.planner.planned_cluster import PlannedCluster
from paceline.planner.search import PlanTurning, PricedCandidate

NAMED_WAYS: Final = 8  # ways that a message names


@dataclass(frozen=True)
class Wishes:
    """What the user asks of the answer.

    Attributes:
        lossy: Whether strategies may be used that change the loss curve.
        sync: The only strategy that may be used, as `--sync` takes it. Empty: the exact all-reduce.
            None: any.
        memory_bytes: Most bytes of a worker. None: no limit.
        mesh: The only mesh that may be used, as `--mesh` takes it. None: any.
        cut: The only cut that may be used, as `--cut` takes it. None: any.
    """

    lossy: bool = False
    sync: str | None = None
    memory_bytes: float | None = None
    mesh: str | None = None
    cut: str | None = None

    @property
    def wants_whole_models(self) -> bool:
        """Whether a strategy is pinned and no cut, so that workers have whole models."""
        return self.sync is not None and self.mesh is None and self.cut is None


@dataclass(frozen=True, repr=False)
class Plan:
    """The answer for one script on one cluster.

    Attributes:
        profile: What was measured of the script.
        cluster: The cluster.
        priced: All ways that are possible, the fastest first.
        best: The fastest way that fits.
        alone: The fastest single worker.
        together: The fastest way that uses all workers, or as many as the pinned mesh has.
        turnings: What would change the answer.
        correction: Factor of the steps of several workers, learnt from runs on this cluster.
    """

    profile: ModelProfile
    cluster: PlannedCluster
    priced: tuple[PricedCandidate, ...]
    best: PricedCandidate
    alone: PricedCandidate
    together: PricedCandidate
    turnings: tuple[PlanTurning, ...]
    correction: float = 1.0

    def __repr__(self) -> str:
        return f"<Plan of {self.profile.script} on {self.cluster.source}: {self.verdict}>"

    @property
    def verdict(self) -> str:
        """Whether more workers help, in a sentence or two."""
        return explain.explain_verdict(self.best, self.alone, self.together)

    def shown(self) -> list[PricedCandidate]:
        """List the best of each kind, and the fastest way of each number of workers."""
        shown = search.choose_best_of_kinds(self.priced)
        counts = {each.candidate.cluster.workers for each in shown}
        for each in self.priced:
            if each.candidate.cluster.workers not in counts:
                counts.add(each.candidate.cluster.workers)
                shown.append(each)
        return sorted(shown, key=lambda each: each.step.seconds)

    def to_fields(self) -> dict[str, Any]:
        """Convert the answer to plain data with stable keys, for `--json`."""
        return {
            "script": self.profile.script,
            "cluster": self.cluster.source,
            "global_batch": self.profile.global_batch,
            "verdict": self.verdict,
            "pays": self.best.candidate.cluster.workers > 1
            and self.best.step.seconds <= search.CLEAR_GAIN * self.alone.step.seconds,
            "best": explain.to_fields(self.best),
            "one_worker": explain.to_fields(self.alone),
            "all_workers": explain.to_fields(self.together),
            "candidates": [explain.to_fields(each) for each in self.priced],
            "changes": explain.explain_turnings(self.turnings),
            "correction": self.correction,
        }

    def save(self, path: str | Path) -> None:
        """Write a plan for `paceline run --plan`.

        Raises:
            UsageError: The file can't be written.
        """
        write_plan(Path(path), self.to_file())

    def to_file(self) -> PlanFile:
        """Make the file that `paceline run --plan` reads."""
        best, rates = self.best, dict[int, float]()
        for each in self.priced:
            count = each.candidate.cluster.workers
            rates[count] = max(rates.get(count, 0.0), each.samples_per_second)
        return PlanFile(
            self.profile.script,
            self.cluster.source,
            len(best.candidate.cluster.hosts),
            tuple(host.workers for host in best.candidate.cluster.hosts),
            best.candidate.sync,
            best.candidate.mesh,
            best.candidate.cut,
            best.candidate.shares,
            best.candidate.kind,
            best.step.seconds,
            best.uncertainty,
            rates,
        )


def list_micro_parts(cluster: PlannedCluster) -> tuple[float, ...]:
    """List the parts of the global batch that micro-batches of pipelines may be: most and least."""
    fewest, most = STAGE_MICRO_BATCHES[0] * 2, STAGE_MICRO_BATCHES[-1] * cluster.workers
    return (float(fewest), float(max(most, 2 * fewest)))


def list_wished(
    cluster: PlannedCluster, wishes: Wishes, cuts: PossibleCuts = WHOLE
) -> list[Candidate]:
    """List the candidates that the user allows. One worker alone is always among them.

    Args:
        cluster: The cluster.
        wishes: What the user asks.
        cuts: How the model can be cut. Default: as a whole only.

    Raises:
        UsageError: The pinned strategy isn't one that can be priced here, or no way has the pinned
            mesh and cut.
    """
    pinned, way = wishes.sync, pin_way(wishes.mesh, wishes.cut)
    cuts = cuts if way is None else way.restrict(cuts)
    candidates = list(list_candidates(cluster, lossy=wishes.lossy or bool(pinned), cuts=cuts))
    if pinned is None and way is None:
        return candidates
    wanted = [each for each in candidates if each.cluster.workers > 1]
    if pinned is not None:
        wanted = [
            each
            for each in wanted
            if each.sync == pinned and not each.recompute and (way is not None or not each.cut)
        ]
        if not wanted:
            names = dict.fromkeys(each.sync or "AllReduce()" for each in candidates)
            raise UsageError(f"--sync {pinned} can't be priced here; there are: {', '.join(names)}")
    if way is not None:
        possible, wanted = wanted, [each for each in wanted if way.has(each)]
        if not wanted:
            raise UsageError(_explain_impossible(wishes, possible))
    alone = [each for each in candidates if each.cluster.workers == 1 and not each.recompute]
    return alone + wanted


def _explain_impossible(wishes: Wishes, possible: Sequence[Candidate]) -> str:
    """Say that no way has the pinned mesh and cut, and name ways that are possible."""
    pinned = [
        f"--{name} {value}"
        for name, value in (("mesh", wishes.mesh), ("cut", wishes.cut), ("sync", wishes.sync))
        if value
    ]
    ways = list(dict.fromkeys(each.describe() for each in possible if not each.recompute))
    shown = "; ".join(ways[:NAMED_WAYS]) + ("; ..." if len(ways) > NAMED_WAYS else "")
    return f"no way to train this script here has {' '.join(pinned)}; there are: {shown or 'none'}"


def make_plan(
    profile: ModelProfile,
    cluster: PlannedCluster,
    wishes: Wishes | None = None,
    correction: float = 1.0,
) -> Plan:
    """Price all ways, and choose the best.

    Args:
        profile: What was measured of the script.
        cluster: The cluster.
        wishes: What the user asks. Default: only exact strategies, no limit of memory.
        correction: Factor of the steps of several workers. Default: 1.

    Raises:
        UsageError: No way fits into the memory; the message has the smallest change that would.
    """
    wishes = Wishes() if wishes is None else wishes
    candidates = list_wished(cluster, wishes, profile.possible_cuts)
    priced = search.price_candidates(profile, candidates, correction)
    fitting = [
        each
        for each in priced
        if wishes.memory_bytes is None or each.memory_bytes <= wishes.memory_bytes
    ]
    if all(each.candidate.recompute for each in fitting):
        raise UsageError(_explain_misfit(profile, priced, wishes))
    best = search.choose_best(fitting)
    return Plan(
        profile,
        cluster,
        tuple(fitting),
        best,
        next(
            each
            for each in priced
            if each.candidate.cluster.workers == 1 and not each.candidate.recompute
        ),
        _find_together(priced),
        tuple(
            search.find_turnings(
                profile,
                cluster,
                best,
                list_ways=lambda changed: list_wished(changed, wishes, profile.possible_cuts),
                describe_link=format_link,
            )
        ),
        correction,
    )


def _find_together(priced: Sequence[PricedCandidate]) -> PricedCandidate:
    """Find the fastest exact way with all workers, or the fastest one if none is exact.

    If a pinned mesh has fewer workers, these are all.
    """
    most = max(each.candidate.cluster.workers for each in priced)
    full = [each for each in priced if each.candidate.cluster.workers == most]
    exact = [
        each
        for each in full
        if not (each.candidate.sync or each.candidate.cut or each.candidate.recompute)
    ]
    return (exact or full)[0]


def _explain_misfit(
    profile: ModelProfile, priced: Sequence[PricedCandidate], wishes: Wishes
) -> str:
    """Name the smallest change with which something would fit."""
    assert wishes.memory_bytes is not None
    least = min(priced, key=lambda each: each.memory_bytes)
    states = least.state_bytes
    limit = format_bytes(round(wishes.memory_bytes))
    fitting = [each for each in priced if each.memory_bytes <= wishes.memory_bytes]
    if fitting:
        layers = ", ".join(shorten_names(profile.checkpointed.names))
        return (
            f"no way fits into {limit} as the script is. With torch.utils.checkpoint around "
            f"{layers}, this would: {fitting[0].candidate.describe()} "
            f"({format_bytes(round(fitting[0].memory_bytes))})"
        )
    text = f"no way fits into {limit}: the smallest needs {format_bytes(round(least.memory_bytes))}"
    if states > wishes.memory_bytes:
        return (
            f"{text}, {format_bytes(states)} of it for parameters, gradients and optimizer: "
            "cut the model (pl.shard), or take workers with as much memory"
        )
    room = (wishes.memory_bytes - states) / max(least.activation_bytes, 1.0)
    batch = int(profile.global_batch * room)
    if batch < 1:
        return f"{text}: not even one sample's activations fit beside the states"
    return f"{text}. A global batch of {batch} samples would fit"


def format_link(bytes_per_second: float) -> str:
    """Format the speed of a link."""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
