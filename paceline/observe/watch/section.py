"""The section "now" of a live page, drawn from the few numbers in `live.json`.

It is cheap, so it can be drawn every second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.formatting import format_count, format_duration
from paceline.observe.page.markup import Markup, element, join_markup
from paceline.observe.tables import format_seconds
from paceline.observe.watch.now import LateRank, RunNow
from paceline.record.status_line import LATE_SECONDS, LATE_SHARE
from paceline.trace import STEP_PARTS

MAX_EVENTS: Final = 12  # events that are listed
_STATE_WORDS: Final = {
    "waiting": "waiting for the workers to begin",
    "running": "running",
    "silent": "no word from it",
    "gone": "broken off: the process that wrote its folder is gone",
    "ended": "ended",
}


def draw_now_section(now: RunNow, messages: Sequence[str] = ()) -> str:
    """Draw the section with the id `now`. `told` are messages of the launcher."""
    return element(
        "section",
        {"id": "now", "data-state": now.state},
        element("h2", None, "Now"),
        _draw_state(now),
        *(element("p", {"class": "told"}, line) for line in messages),
        _draw_figures(now),
        _draw_parts(now),
        _draw_lateness(now),
        element("p", {"class": "warning"}, now.link) if now.link else None,
        _draw_hosts(now),
        _draw_events(now),
    )


def _draw_state(now: RunNow) -> Markup:
    """Draw the state of the run."""
    words = (
        f"failed at step {now.step}: {now.why}"
        if now.state == "failed"
        else _STATE_WORDS[now.state]
    )
    if now.state == "silent":
        words = (
            "no word from it for a minute or more: its steps take long, it evaluates, or its "
            "folder isn't reached"
        )
    return element(
        "p",
        {"class": f"moment {now.state}"},
        element("strong", None, now.name or "a run"),
        " ",
        words,
    )


def _draw_figures(now: RunNow) -> Markup | None:
    """Draw the main figures."""
    if now.state == "waiting":
        return None
    step = f"{now.step:,}" if now.total_steps is None else f"{now.step:,} of {now.total_steps:,}"
    # Unknown values have no cell.
    cells = [("step", step), ("loss", _format_loss(now.loss))]
    if now.samples_per_second is not None:
        cells.append(("samples/s", f"{now.samples_per_second:,.0f}"))
    if now.seconds is not None:
        cells.append(("since its start", format_duration(now.seconds)))
    if now.seconds_left is not None:
        cells.append(("left, about", format_duration(now.seconds_left)))
    cells.append(("workers", str(now.workers)))
    if now.checkpoints:
        cells.append(("checkpoints", str(now.checkpoints)))
    figures = (
        element("div", None, element("dt", None, name), element("dd", None, value))
        for name, value in cells
    )
    return element("dl", {"class": "figures"}, *figures)


def _format_loss(loss: float | str | None) -> str:
    """Format the loss."""
    return "none logged" if loss is None else loss if isinstance(loss, str) else f"{loss:.4g}"


def _draw_parts(now: RunNow) -> Markup | None:
    """Draw how the last steps spent their time, as a bar with its numbers."""
    step_seconds = sum(now.parts.values())
    if step_seconds <= 0:
        return None
    shares = {part: now.parts[part] / step_seconds for part in STEP_PARTS}
    subject = "a mean step" if now.state == "ended" else "the last steps"
    # `flex-grow` divides the width among the parts.
    bar = [
        element("span", {"class": f"part {part}", "style": f"flex-grow:{share:.4f}"})
        for part, share in shares.items()
    ]
    legend = [
        element(
            "span",
            None,
            element("i", {"class": f"part {part}"}),
            f" {part} {share:.0%}, {format_seconds(now.parts[part])}",
        )
        for part, share in shares.items()
    ]
    description = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
    return element(
        "div",
        {"class": "parts"},
        element(
            "p", None, f"Where the time of {subject} went ({format_seconds(step_seconds)} each):"
        ),
        element("div", {"class": "bar", "role": "img", "aria-label": description}, *bar),
        element("p", {"class": "key"}, *legend),
    )


def _draw_lateness(now: RunNow) -> Markup | None:
    """Draw the worker that makes others wait, or that there is none."""
    late = now.late
    if now.state == "ended" or late is None:
        return None
    if not is_late_enough(late):
        return element("p", None, "No worker makes the others wait.")
    share = late.seconds / late.step
    return element(
        "p",
        {"class": "warning"},
        f"rank {late.rank} on {late.host} is late by {share:.0%} of a step: {late.cause}",
    )


def is_late_enough(late: LateRank) -> bool:
    """Whether a worker is late enough to be shown, by the limits of the status line."""
    return late.seconds >= LATE_SECONDS and late.seconds >= LATE_SHARE * late.step


def _draw_hosts(now: RunNow) -> Markup | None:
    """Draw a table of the hosts and their workers, with shares of the batch."""
    if not now.cluster:
        return None
    late_rank = now.late.rank if now.late is not None and is_late_enough(now.late) else None
    # Shares of another number of workers are from before a change.
    shares_by_rank = (
        {rank: str(shares_by_rank) for rank, shares_by_rank in enumerate(now.shares)}
        if len(now.shares) == now.workers
        else {}
    )
    rows = [
        element(
            "tr",
            None,
            element("th", {"scope": "row"}, host),
            element(
                "td",
                None,
                *(
                    _draw_worker(rank, shares_by_rank.get(rank), late=rank == late_rank)
                    for rank in ranks
                ),
            ),
        )
        for host, ranks in now.cluster
    ]
    note = f"; samples of each in a batch of {sum(now.shares):,}" if shares_by_rank else ""
    title = (
        f"{format_count(now.workers, 'worker')} on {format_count(len(now.cluster), 'host')}{note}"
    )
    return element(
        "table", {"class": "hosts"}, element("caption", None, title), element("tbody", None, *rows)
    )


def _draw_worker(rank: int, share: str | None, *, late: bool) -> Markup:
    """Draw a worker with its share of the batch."""
    words = (
        f"rank {rank}" + (f": {share}" if share is not None else "") + (", late" if late else "")
    )
    return join_markup(element("span", {"class": "worker late" if late else "worker"}, words), " ")


def _draw_events(now: RunNow) -> Markup | None:
    """Draw the last events, the newest first."""
    if not now.events:
        return None
    rows = [
        element("li", None, element("time", None, format_duration(max(time, 0.0))), " ", what)
        for time, what in reversed(now.events[-MAX_EVENTS:])
    ]
    return element(
        "div", {"class": "events"}, element("h3", None, "Last events"), element("ol", None, *rows)
    )
