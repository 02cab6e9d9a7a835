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
from paceline.comm.group_protocol import Traffic
from paceline.data.loader import ShareLoader
from paceline.formatting import format_as_call, format_count, format_duration
from paceline.loop.step_clock import AxisTotals
from paceline.prepare.registry import Prepared
from paceline.record import timeline
from paceline.record.folder import RunFolder, RunSummary, RunTotals
from paceline.record.log import MetricsLog
from paceline.record.outcome.goodput import make_goodput_fields
from paceline.record.outcome.worker_time import WorkerSeconds, WorkerTime
from paceline.record.pipeline_profile import PipelineProfile, combine_workers
from paceline.state.snapshot import view_cpu_bytes
from paceline.sync.base import Strategy
from paceline.sync.codec_cost import judge_codec
from paceline.trace import ServerWork, Span
from paceline.workers.axes import RunAxes


class RunOutcome(NamedTuple):
    """The settings of a run and its results, as one worker knows them."""

    strategy: Strategy
    cluster: Topology
    prepared: Prepared
    # Bytes sent by this worker, in all steps.
    sent: Traffic
    # Time and bytes of this worker's exchanges along each axis, if a model is cut.
    along: dict[str, AxisTotals]
    # Facts of this worker's `MemoryWatch`.
    memory: dict[str, Any]
    # Causes of lateness that can't be told apart where this worker runs.
    untold: Sequence[str]
    event: Callable[[str], None]
    events: list[dict[str, Any]]
    saves: list[dict[str, Any]]
    # Wall time at which the run began; events count from it.
    began: float
    checkpoints: dict[str, Any]
    # Facts of each server.
    servers: list[dict[str, Any]]
    # Spans of each server, on the first worker.
    served: list[ServerWork]
    results: dict[str, Any]
    # Links that became slow.
    links: list[dict[str, Any]]
    # Settings of the run.
    settings: dict[str, Any]
    worker_time: WorkerTime


class GatheredEnds(NamedTuple):
    """What the workers tell each other at the end of a run."""

    # Bytes sent by each worker, within hosts and between them.
    sent: list[list[int]]
    # The `AxisTotals` of each worker.
    along: list[dict[str, list[float]]]
    memory: list[dict[str, Any]]
    # Causes of lateness that some workers could not tell apart.
    untold: list[str]
    # Offset of each worker's clock.
    ahead: list[timeline.ClockOffset]
    pipelines: list[PipelineProfile]
    spans: dict[int, list[Span]]
    # SHA-256 of the parameters.
    digest: str
    # Ranks whose parameters differ, with the rank whose replicas they are.
    different: dict[int, int]
    codecs: list[Any]
    worker_seconds: list[WorkerSeconds]


def write_outcome(outcome: RunOutcome, axes: RunAxes, folder: RunFolder, log: MetricsLog) -> None:
    """Write the summary and the trace. Collective.

    If the disk refuses, all workers raise.
    """
    ends = _gather_ends(outcome, axes)
    axes.everyone.tell_everyone(
        "the summary", lambda: _write_files(outcome, axes, folder, log, ends)
    )


def _gather_ends(outcome: RunOutcome, axes: RunAxes) -> GatheredEnds:
    """Exchange all that only single workers know. Collective."""
    agreement, cluster, context = axes.everyone, outcome.cluster, axes.slice
    bytes_sent = [outcome.sent.within, outcome.sent.between]
    heads = [
        msgpack.unpackb(body)
        for body in agreement.meet(
            "bytes sent",
            msgpack.packb(
                [
                    bytes_sent,
                    outcome.along,
                    outcome.memory,
                    outcome.untold,
                    outcome.worker_time.collect_seconds(),
                ]
            ),
        )
    ]
    sent, along, memory, untold, seconds = ([head[at] for head in heads] for at in range(5))
    ahead = timeline.compare_clocks(agreement, cluster.host_by_rank())
    spans = timeline.gather_spans(agreement, context.trace.list_spans())
    pipelines = _combine_pipelines(outcome.prepared, axes, ahead)
    digest, different = _compare_replicas(outcome, axes)
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
        [WorkerSeconds(*fields) for fields in seconds],
    )


def _compare_replicas(outcome: RunOutcome, axes: RunAxes) -> tuple[str, dict[int, int]]:
    """Compare the parameters of all workers. Collective.

    Returns:
        The digest of the whole model; and the ranks that differ, with the rank whose replicas they
        are.
    """
    agreement = axes.everyone
    # Replicas must have equal parameters. A rank is compared with the first rank that holds the
    # same part of the model.
    own_digest = outcome.prepared.tables.combine_digest(
        hash_parameters(model for _, model in outcome.prepared.models)
    )
    digests = [body.decode() for body in agreement.meet("parameters", own_digest.encode())]
    reference_ranks = [axes.first_replica_of(rank) for rank in range(len(digests))]
    different = {
        rank: twin for rank, twin in enumerate(reference_ranks) if digests[rank] != digests[twin]
    }
    # One digest for the whole model: of all its different parts in rank order.
    part_digests = [digests[rank] for rank in dict.fromkeys(reference_ranks)]
    digest = (
        part_digests[0]
        if len(part_digests) == 1
        else hashlib.sha256("".join(part_digests).encode()).hexdigest()
    )
    return digest, different


def _write_files(
    outcome: RunOutcome, axes: RunAxes, folder: RunFolder, log: MetricsLog, ends: GatheredEnds
) -> bytes:
    """Write both files on the first worker."""
    totals = log.compute_totals()
    assert totals is not None, "the first worker keeps the book"
    context = axes.slice
    if ends.different:
        different, reference = (
            ", ".join(map(str, dict.fromkeys(ranks)))
            for ranks in (ends.different, ends.different.values())
        )
        text = (
            f"replicas have parted: the parameters of rank {different} are not those of rank "
            f"{reference}"
        )
        outcome.event(text)
        context.announce(f"{text} at the end; was something changed on some workers only?")
    log_began = log.opened_at - outcome.began
    goodput = describe_goodput(log, ends.worker_seconds, outcome.worker_time, log_began)
    summary = _make_summary(outcome, axes, ends, totals, log_began=log_began, goodput=goodput)
    summary.write(folder)
    if log.feed is not None:
        log.feed.report_summary(summary.to_fields())
    # Without spans (trace="off") there is no trace file.
    if any(ends.spans.values()):
        mesh = axes.mesh if axes.cut_axes else None
        spans = timeline.add_late_spans(ends.spans, log.lateness.recent_late_ranks())
        events = timeline.make_trace_events(
            spans,
            names=outcome.cluster.host_names(),
            offsets=ends.ahead,
            servers=outcome.served,
            mesh=mesh,
        )
        timeline.write_trace(folder.trace, events, offsets=ends.ahead)
    # A run in the temporary folder is removed by the tool that started it, so its path is useless.
    is_temporary = folder.path.is_absolute() and folder.path.is_relative_to(tempfile.gettempdir())
    if totals.steps and not is_temporary:
        context.announce(describe_result(folder.path, totals))
    return b""


def _make_summary(
    outcome: RunOutcome,
    axes: RunAxes,
    ends: GatheredEnds,
    totals: RunTotals,
    *,
    log_began: float,
    goodput: dict[str, Any],
) -> RunSummary:
    """Make the summary. `log_began` is the time of the run at which its log was opened."""
    steps = max(totals.steps, 1)
    mean_step = sum(totals.step_seconds.values())
    verdicts = [
        judge_codec(facts, mean_step, totals.steps) for facts in zip(*ends.codecs, strict=True)
    ]
    return RunSummary(
        sync=format_as_call(outcome.strategy),
        workers=axes.everyone.group.size,
        hosts=len(outcome.cluster.hosts),
        totals=totals,
        bytes_sent={
            "within": sum(within for within, _ in ends.sent) / steps,
            "between": sum(between for _, between in ends.sent) / steps,
        },
        codecs=[asdict(verdict) for verdict in verdicts if verdict is not None],
        parameters_sha256=ends.digest,
        events=outcome.events,
        saves=outcome.saves,
        checkpoints=outcome.checkpoints,
        servers=outcome.servers,
        loader=describe_dealing(outcome.prepared.loaders),
        mesh=dict(axes.mesh.axes) if axes.cut_axes else {},
        places=[axes.mesh.coordinates(rank) for rank in range(axes.mesh.size)]
        if axes.cut_axes
        else [],
        axes=_sum_by_axis(ends.along, axes, steps),
        memory=ends.memory,
        log_began=log_began,
        untold=ends.untold,
        pipelines=[profile.to_fields() for profile in ends.pipelines],
        route=axes.replicas.route,
        links=outcome.links,
        goodput=goodput,
        settings=outcome.settings,
        results=outcome.results,
    )


def describe_goodput(
    log: MetricsLog, present: Sequence[WorkerSeconds], own: WorkerTime, log_began: float
) -> dict[str, Any]:
    """Describe where the time of all workers went, on the first worker.

    Args:
        log: Its log.
        present: Times of the workers that are there.
        own: Time of the first worker.
        log_began: Seconds from the start of the run to time 0 of its log.
    """
    writer = log.writer
    assert writer is not None, "the first worker writes the log"
    workers = [*present, *writer.members.list_lost_times(log_began)]
    return make_goodput_fields(workers, writer.earlier, own)


def describe_result(path: Path, totals: RunTotals) -> str:
    """Describe in one line where the run's folder is, its result, and how to learn more."""
    loss = "" if totals.final_loss is None else f", loss {totals.final_loss:.4g}"
    duration = f"{totals.seconds:.1f} s" if totals.seconds < 60 else format_duration(totals.seconds)
    return (
        f"{path}: {format_count(totals.steps, 'step')}{loss}, {duration}; "
        f"paceline report {shlex.quote(str(path))}"
    )


def _sum_by_axis(
    along: Sequence[Mapping[str, Sequence[float]]], axes: RunAxes, steps: int
) -> dict[str, dict[str, float]]:
    """Return the exchange of a step along each axis.

    It has the mean seconds of a worker, and the bytes of all workers.
    """
    totals_by_axis = {}
    for axis in (name for name, size in axes.mesh.axes if axes.cut_axes and size > 1):
        rows = [worker.get(axis, (0.0, 0, 0)) for worker in along]
        seconds, within, between = (sum(column) / steps for column in zip(*rows, strict=True))
        totals_by_axis[axis] = {
            "seconds": seconds / len(along),
            "within": within,
            "between": between,
        }
    return totals_by_axis


def _combine_pipelines(
    prepared: Prepared, axes: RunAxes, ahead: Sequence[timeline.ClockOffset]
) -> list[PipelineProfile]:
    """Return the profile of each pipeline: of each model, and of each replica. Collective."""
    own_profiles = [pipeline.make_profile() for _, pipeline in prepared.cuts.pipelines]
    if not own_profiles:
        return []
    bodies = axes.everyone.meet("pipelines", msgpack.packb(own_profiles))
    profiles_by_rank = [msgpack.unpackb(body, strict_map_key=False) for body in bodies]
    combined = []
    for at, ranks in itertools.product(
        range(len(own_profiles)), axes.mesh.rank_groups_along(["stage"])
    ):
        profiles = [profiles_by_rank[rank][at] for rank in ranks]
        combined.append(combine_workers(profiles, ranks, [ahead[rank] for rank in ranks]))
    return [profile for profile in combined if profile is not None]


def describe_dealing(loaders: Iterable[ShareLoader]) -> dict[str, Any] | None:
    """Describe how the first training loader is dealt; None if there is none."""
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


def hash_parameters(models: Iterable[nn.Module]) -> str:
    """Return the SHA-256 of the names and the bits of all parameters."""
    digest = hashlib.sha256()
    for model in models:
        for name, parameter in model.named_parameters():
            digest.update(name.encode())
            digest.update(view_cpu_bytes(parameter.detach()).numpy().data)
    return digest.hexdigest()
