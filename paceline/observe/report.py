"""The report on a run in words: where its time went, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from paceline.formatting import escape_unprintable, format_bytes, format_count, format_duration
from paceline.observe import pipeline_report, server_report
from paceline.observe.advice import MIN_SECONDS, format_advice
from paceline.observe.facts import RunFacts, read_facts
from paceline.observe.goodput_report import describe_goodput
from paceline.observe.tables import align_columns, format_seconds
from paceline.record.folder import MEMORY_KINDS, RunFolder
from paceline.trace import STEP_PARTS
from paceline.unequal.stragglers.causes import CAUSES, WORDS

MAX_EVENTS = 200  # events that are listed
# Least seconds of a step that show in a table.
MIN_SHOWN_SECONDS = 5e-5
_PART_MEANINGS = {
    "compute": "forward, backward and the optimizer",
    "exchange": "what could not be hidden behind compute",
    "wait": "for slower workers",
    "data": "for the next batch",
}


def format_report(folder: Path) -> str:
    """Format the report on the run in `folder`. If it has not ended, report what is known so far.

    Raises:
        UsageError: The folder does not exist, isn't that of a run, or has a damaged file.
    """
    facts = read_facts(RunFolder(folder))
    if facts.steps == 0:
        return (
            f"{escape_unprintable(_format_title(facts))}\n\nNo step was finished, "
            "so there is nothing to tell about time."
        )
    server_text = server_report.describe_servers(facts.servers, facts.seconds or 0.0, facts.samples)
    blocks = [
        _format_title(facts),
        _format_times(facts),
        facts.planned,
        describe_goodput(facts.goodput),
        _format_lateness(facts),
        _format_links(facts),
        _format_traffic(facts),
        _format_axes(facts),
        pipeline_report.describe_pipeline(facts),
        *facts.codecs,
        server_text,
        _format_memory(facts),
        _format_checkpoints(facts),
        format_advice(facts),
        _format_events(facts),
    ]
    return escape_unprintable("\n\n".join(block for block in blocks if block))


# The blocks of the report -----------------------------------------------------------------------


def _format_title(facts: RunFacts) -> str:
    """Format the title: run, strategy, workers, steps, time and loss."""
    duration = "" if facts.seconds is None else f" in {format_duration(facts.seconds)}"
    loss = (
        ""
        if facts.final_loss is None
        else f"; {'final' if facts.ended else 'last'} loss {facts.final_loss:.4g}"
    )
    done = (
        f"{format_count(facts.steps, 'step')} of {format_count(facts.samples, 'sample')} in "
        f"all{duration}{loss}"
    )
    if not facts.ended:
        return f"{facts.name} {facts.standing.words}. So far: {done}"
    mesh = "" if facts.mesh is None else f", mesh {facts.mesh}"
    return (
        f"{facts.name}: {facts.sync}{mesh}, {format_count(facts.workers, 'worker')} on "
        f"{format_count(facts.hosts, 'host')}, {done}"
    )


def _format_times(facts: RunFacts) -> str:
    """Format where the time of a step went, by parts."""
    rate = (
        f" ({facts.samples / facts.steps / facts.mean_step_seconds:,.0f} samples/s)"
        if facts.mean_step_seconds > 0
        else ""
    )
    lines = [
        (
            f"A step took {format_seconds(facts.mean_step_seconds)}{rate}, mean over "
            f"steps{' and workers' if facts.workers > 1 else ''}:"
        )
    ]
    for part in STEP_PARTS:
        lines.append(
            f"  {part:<9}{facts.share_of_step(part):>5.0%}  "
            f"{format_seconds(facts.step_seconds[part]):>9}  "
            f"{_PART_MEANINGS[part]}"
        )
    # Before the end of a run, its seconds are those of its last step.
    if facts.ended and facts.seconds:
        outside_seconds = facts.seconds - facts.mean_step_seconds * facts.steps
        if outside_seconds > 0.05 * facts.seconds:
            lines.append(
                f"Outside of steps: {format_duration(outside_seconds)}, "
                f"{outside_seconds / facts.seconds:.0%} of the run (evaluation, "
                "checkpoints, the start)."
            )
    return "\n".join(lines)


def _format_lateness(facts: RunFacts) -> str:
    """Format how late each worker was and why; empty if that took less than a twentieth of a step.

    Causes that took nothing are left out.
    """
    most_seconds = max((sum(late.values()) for late in facts.late), default=0.0)
    if most_seconds < max(MIN_SECONDS, 0.05 * facts.mean_step_seconds):
        return ""
    # A column for each cause that shows at least one number.
    causes = [
        cause
        for cause in CAUSES
        if any(late.get(cause, 0.0) >= MIN_SHOWN_SECONDS for late in facts.late)
    ]
    rows = [
        (
            facts.name_rank(rank),
            *(
                format_seconds(value)
                for value in (sum(late.values()), *(late.get(cause, 0.0) for cause in causes))
            ),
        )
        for rank, late in enumerate(facts.late)
    ]
    head = "How much later than usual each worker was in a mean step, and why:"
    table = align_columns([("", "late", *(WORDS[cause] for cause in causes)), *rows])
    untold = (
        [f"Not told apart on this machine: {' and '.join(WORDS[cause] for cause in facts.untold)}."]
        if facts.untold
        else []
    )
    return "\n".join([head, *table, *untold])


def _format_links(facts: RunFacts) -> str:
    """Format the links that became slow."""
    return "\n".join(f"From step {link.step} on {link.words}." for link in facts.links)


def _format_traffic(facts: RunFacts) -> str:
    """Format the bytes of a step within and between hosts."""
    if facts.bytes_sent is None or facts.workers == 1:
        return ""
    within, between = facts.bytes_sent["within"], facts.bytes_sent["between"]
    text = (
        f"All workers together sent {format_bytes(within)} within hosts and "
        f"{format_bytes(between)} between "
        "hosts in a step."
    )
    exchange_seconds = facts.step_seconds["exchange"]
    if between > 0 and facts.hosts > 1 and exchange_seconds > 0:
        text += (
            " Over the exposed exchange that is "
            f"{between * 8 / facts.hosts / exchange_seconds / 1e6:,.0f} Mbit/s out of each host."
        )
    return text


def _format_axes(facts: RunFacts) -> str:
    """Format the exchanges of a step along each axis of the mesh."""
    if not facts.axes:
        return ""
    lines = [
        (
            "Along the axes of the mesh, waits for others included; "
            "bytes are those of all workers in a step:"
        )
    ]
    for along in facts.axes:
        share = along.seconds / facts.mean_step_seconds if facts.mean_step_seconds > 0 else 0.0
        sent = (
            f"{format_bytes(along.within)} within hosts, {format_bytes(along.between)} between "
            "hosts"
        )
        lines.append(f"  {along.axis:<9}{share:>5.0%}  {format_seconds(along.seconds):>9}  {sent}")
    return "\n".join(lines)


def _format_memory(facts: RunFacts) -> str:
    """Format the memory of the workers. Workers with the same memory share a line."""
    ranks_by_cells: dict[tuple[str, ...], list[int]] = {}
    for rank, held in enumerate(facts.memory):
        cells = tuple(
            _format_held(held.measured[kind], held.predicted[kind]) for kind in MEMORY_KINDS
        )
        ranks_by_cells.setdefault(cells, []).append(rank)
    rows = [
        # The peak differs a little in each process, so the largest of the line is shown.
        (
            facts.name_ranks(ranks),
            *cells,
            format_bytes(max(facts.memory[rank].peak for rank in ranks)),
        )
        for cells, ranks in ranks_by_cells.items()
    ]
    if not rows:
        return ""
    head = (
        "Held by each worker from step to step (in brackets what was predicted, where that is "
        "something else):"
    )
    return "\n".join([head, *align_columns([("", *MEMORY_KINDS, "process at most"), *rows])])


def _format_held(measured: int, predicted: int | None) -> str:
    """Format measured bytes, and the predicted bytes if they look different."""
    text = format_bytes(measured)
    return (
        text
        if predicted is None or format_bytes(predicted) == text
        else f"{text} ({format_bytes(predicted)})"
    )


def _format_checkpoints(facts: RunFacts) -> str:
    """Format the cost of checkpoints."""
    if not facts.saves:
        return ""
    once, best = (
        facts.saves == 1,
        ""
        if facts.best is None
        else f" The best is {facts.best[0]}, with a metric of {facts.best[1]:.6g}.",
    )
    return (
        f"{format_count(facts.saves, 'checkpoint')}: training stood still for "
        f"{format_seconds(facts.stall)}{'' if once else ' each'}, and "
        f"{'it was' if once else 'they were'} on the disk after {format_seconds(facts.write)} of "
        f"writing{'' if once else ' each'}.{best}"
    )


def _format_events(facts: RunFacts) -> str:
    """Format the last events."""
    head = (
        "Events:"
        if len(facts.events) <= MAX_EVENTS
        else f"Events, the last {MAX_EVENTS} of {len(facts.events):,}; all are in summary.json:"
    )
    lines = [
        f"  {format_duration(event['time']):>7}  {event['what']}"
        for event in facts.events[-MAX_EVENTS:]
    ]
    return "\n".join([head, *lines]) if lines else ""
