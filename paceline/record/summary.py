"""Ends a run that went well: the first worker writes summary.json and trace.json."""

from __future__ import annotations

import hashlib
import itertools
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from torch import nn

from paceline.cluster.topology import Topology
from paceline.comm.group import Traffic
from paceline.data.loader import ShareLoader
from paceline.formatting import counted, spell, spoken
from paceline.loop.step_clock import AxisTotals
from paceline.prepare.registry import Prepared
from paceline.record import timeline
from paceline.record.folder import RunFolder, RunSummary, RunTotals
from paceline.record.log import MetricsLog
from paceline.record.pipeline_profile import PipelineProfile, combine
from paceline.state.snapshot import raw
from paceline.sync.base import Strategy
from paceline.sync.codec_cost import judge
from paceline.trace import Served, Span
from paceline.workers.axes import RunAxes


class RunOutcome(NamedTuple):
    """What a run was, and what it has come to."""

    strategy: Strategy
    cluster: Topology
    prepared: Prepared
    sent: Traffic  # by this worker, in all steps
    # of that, and of its time, what it has exchanged along each axis, where a model is cut
    along: dict[str, AxisTotals]
    memory: dict[str, Any]  # the facts of this worker's `MemoryWatch`
    untold: Sequence[str]  # causes of lateness that can't be told where this worker runs
    event: Callable[[str], None]
    events: list[dict[str, Any]]
    saves: list[dict[str, Any]]
    began: float  # when the run did, which events count from
    checkpoints: dict[str, Any]
    servers: list[dict[str, Any]]  # what each has done
    served: list[Served]  # and when, on the first worker
    results: dict[str, Any]
    links: list[dict[str, Any]]  # that became slow
    settings: dict[str, Any]  # what was asked for


class GatheredEnds(NamedTuple):
    """What the workers tell each other at the end."""

    sent: list[list[int]]  # by each worker, within hosts and between them
    along: list[dict[str, list[float]]]  # the `AxisTotals` of each one
    memory: list[dict[str, Any]]  # of each one
    untold: list[str]  # on some of them
    ahead: list[timeline.ClockOffset]  # of each one
    pipelines: list[PipelineProfile]
    spans: dict[int, list[Span]]
    digest: str  # of the parameters
    different: dict[int, int]  # ranks that have other ones than the rank whose replicas they are
    codecs: list[Any]


def conclude(outcome: RunOutcome, axes: RunAxes, folder: RunFolder, log: MetricsLog) -> None:
    """Write the summary and the trace. Collective: where the disk refuses, all workers raise."""
    found = _gather(outcome, axes)
    axes.everyone.tell("the summary", lambda: _write(outcome, axes, folder, log, found))


def _gather(outcome: RunOutcome, axes: RunAxes) -> GatheredEnds:
    agreement, cluster, context = axes.everyone, outcome.cluster, axes.slice
    bytes_sent = [outcome.sent.within, outcome.sent.between]
    heads = [
        msgpack.unpackb(body)
        for body in agreement.meet(
            "bytes sent", msgpack.packb([bytes_sent, outcome.along, outcome.memory, outcome.untold])
        )
    ]
    sent, along, memory, untold = ([head[at] for head in heads] for at in range(4))
    ahead = timeline.compare(agreement, cluster.where())
    spans = timeline.gather(agreement, context.trace.spans())
    pipelines = _pipelines(outcome.prepared, axes, ahead)
    mine = outcome.prepared.tables.fingerprint(
        fingerprint(model for _, model in outcome.prepared.models)
    )
    digests = [body.decode() for body in agreement.meet("parameters", mine.encode())]
    twins = [axes.twin(rank) for rank in range(len(digests))]
    different = {rank: twin for rank, twin in enumerate(twins) if digests[rank] != digests[twin]}
    parts = [digests[rank] for rank in dict.fromkeys(twins)]
    digest = parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()
    codecs = [
        msgpack.unpackb(body)
        for body in agreement.meet(
            "codecs", msgpack.packb([account.facts() for account in context.accounts])
        )
    ]
    return GatheredEnds(
        sent,
        along,
        memory,
        sorted(set(itertools.chain(*untold))),
        ahead,
        pipelines,
        spans,
        digest,
        different,
        codecs,
    )


def _write(
    outcome: RunOutcome, axes: RunAxes, folder: RunFolder, log: MetricsLog, found: GatheredEnds
) -> bytes:
    """Write both files, on the first worker."""
    totals = log.totals()
    assert totals is not None, "the first worker keeps the book"
    cluster, context = outcome.cluster, axes.slice
    if found.different:
        different, others = (
            ", ".join(map(str, dict.fromkeys(ranks)))
            for ranks in (found.different, found.different.values())
        )
        text = (
            f"replicas have parted: the parameters of rank {different} are not those of rank "
            f"{others}"
        )
        outcome.event(text)
        context.announce(f"{text} at the end; was something changed on some workers only?")
    steps = max(totals.steps, 1)
    step = sum(totals.step_seconds.values())
    verdicts = [judge(facts, step, totals.steps) for facts in zip(*found.codecs, strict=True)]
    summary = RunSummary(
        sync=spell(outcome.strategy),
        workers=axes.everyone.group.size,
        hosts=len(cluster.hosts),
        totals=totals,
        bytes_sent={
            "within": sum(s[0] for s in found.sent) / steps,
            "between": sum(s[1] for s in found.sent) / steps,
        },
        codecs=[asdict(verdict) for verdict in verdicts if verdict is not None],
        parameters_sha256=found.digest,
        events=outcome.events,
        saves=outcome.saves,
        checkpoints=outcome.checkpoints,
        servers=outcome.servers,
        loader=dealt(outcome.prepared.loaders),
        mesh=dict(axes.mesh.axes) if axes.cut else {},
        places=[axes.mesh.coordinates(rank) for rank in range(axes.mesh.size)] if axes.cut else [],
        axes=_by_axis(found.along, axes, steps),
        memory=found.memory,
        log_began=log.opened - outcome.began,
        untold=found.untold,
        pipelines=[profile.fields() for profile in found.pipelines],
        route=axes.replicas.route,
        links=outcome.links,
        settings=outcome.settings,
        results=outcome.results,
    )
    summary.write(folder)
    if log.feed is not None:
        log.feed.conclude(summary.fields())
    if any(found.spans.values()):
        mesh = axes.mesh if axes.cut else None
        spans = timeline.mark_late(found.spans, log.lateness.recent())
        events = timeline.merge(
            spans, names=cluster.names(), offsets=found.ahead, servers=outcome.served, mesh=mesh
        )
        timeline.write(folder.trace, events, offsets=found.ahead)
    if totals.steps and not (
        folder.path.is_absolute() and folder.path.is_relative_to(tempfile.gettempdir())
    ):  # else it is removed by what asked for it
        context.announce(told(folder.path, totals))
    return b""


def told(path: Path, totals: RunTotals) -> str:
    """Say in a line where a run's folder is, what came of it, and how to learn more."""
    loss = "" if totals.final_loss is None else f", loss {totals.final_loss:.4g}"
    took = f"{totals.seconds:.1f} s" if totals.seconds < 60 else spoken(totals.seconds)
    return (
        f"{path}: {counted(totals.steps, 'step')}{loss}, {took}; "
        f"paceline report {shlex.quote(str(path))}"
    )


def _by_axis(
    along: Sequence[Mapping[str, Sequence[float]]], axes: RunAxes, steps: int
) -> dict[str, dict[str, float]]:
    """Return what a step has taken for exchanges along each axis: the mean of seconds, and the
    bytes of all workers.
    """
    found = {}
    for axis in (name for name, size in axes.mesh.axes if axes.cut and size > 1):
        seconds, within, between = (
            sum(column) / steps
            for column in zip(*(each.get(axis, (0.0, 0, 0)) for each in along), strict=True)
        )
        found[axis] = {"seconds": seconds / len(along), "within": within, "between": between}
    return found


def _pipelines(
    prepared: Prepared, axes: RunAxes, ahead: Sequence[timeline.ClockOffset]
) -> list[PipelineProfile]:
    """Return what was measured of each pipeline: of each model, and of each replica or part of it.

    Collective.
    """
    mine = [pipeline.profile() for _, pipeline in prepared.cuts.pipelines]
    if not mine:
        return []
    told = [
        msgpack.unpackb(body, strict_map_key=False)
        for body in axes.everyone.meet("pipelines", msgpack.packb(mine))
    ]
    groups = itertools.product(range(len(mine)), axes.mesh.groups(["stage"]))
    found = (
        combine([told[rank][at] for rank in ranks], ranks, [ahead[rank] for rank in ranks])
        for at, ranks in groups
    )
    return [profile for profile in found if profile is not None]


def dealt(loaders: Iterable[ShareLoader]) -> dict[str, Any] | None:
    """Return how the first training loader is dealt; None where there is none."""
    terms = next(
        (
            loader.terms
            for loader in loaders
            if loader.terms.train is not False and loader.terms.training
        ),
        None,
    )
    if terms is None:
        return None
    batch = terms.loader.batch_size
    return {
        "num_workers": terms.loader.num_workers,
        "shares": [] if batch is None else list(terms.shares(batch)),
    }


def fingerprint(models: Iterable[nn.Module]) -> str:
    """Return the SHA-256 of all parameters, names and bits."""
    digest = hashlib.sha256()
    for model in models:
        for name, parameter in model.named_parameters():
            digest.update(name.encode())
            digest.update(raw(parameter.detach()).numpy().data)
    return digest.hexdigest()
