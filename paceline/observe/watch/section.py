"""The section of a live page that says how the run is now: drawn from the few numbers in
`live.json`, so it can be made each second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.formatting import counted, spoken
from paceline.observe.page.markup import Markup, element, join
from paceline.observe.tables import seconds
from paceline.observe.watch.now import LateRank, RunNow
from paceline.record.status_line import LATE, LEAST
from paceline.trace import PARTS

SHOWN: Final = 12  # of the last events
_STATES: Final = {
    "waiting": "waiting for the workers to begin",
    "running": "running",
    "silent": "no word from it",
    "gone": "broken off: the process that wrote its folder is gone",
    "ended": "ended",
}


def now_section(now: RunNow, told: Sequence[str] = ()) -> str:
    """Return the section with the id `now`.

    `told`: what the launcher has said of the run, in its words.
    """
    return element(
        "section",
        {"id": "now", "data-state": now.state},
        element("h2", None, "Now"),
        _state(now),
        *(element("p", {"class": "told"}, line) for line in told),
        _numbers(now),
        _parts(now),
        _late(now),
        element("p", {"class": "warning"}, now.link) if now.link else None,
        _hosts(now),
        _events(now),
    )


def _state(now: RunNow) -> Markup:
    words = f"failed at step {now.step}: {now.why}" if now.state == "failed" else _STATES[now.state]
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


def _numbers(now: RunNow) -> Markup | None:
    """Draw the figures that a glance looks for."""
    if now.state == "waiting":
        return None
    step = f"{now.step:,}" if now.total_steps is None else f"{now.step:,} of {now.total_steps:,}"
    cells = [("step", step), ("loss", _loss(now.loss))]
    if now.samples_per_second is not None:
        cells.append(("samples/s", f"{now.samples_per_second:,.0f}"))
    if now.seconds is not None:
        cells.append(("since its start", spoken(now.seconds)))
    if now.left is not None:
        cells.append(("left, about", spoken(now.left)))
    cells.append(("workers", str(now.workers)))
    if now.checkpoints:
        cells.append(("checkpoints", str(now.checkpoints)))
    return element(
        "dl",
        {"class": "figures"},
        *(element("div", None, element("dt", None, k), element("dd", None, v)) for k, v in cells),
    )


def _loss(loss: float | str | None) -> str:
    return "none logged" if loss is None else loss if isinstance(loss, str) else f"{loss:.4g}"


def _parts(now: RunNow) -> Markup | None:
    """Draw where the time of the last steps went, as a bar with its numbers beside it."""
    whole = sum(now.parts.values())
    if whole <= 0:
        return None
    shares = {part: now.parts[part] / whole for part in PARTS}
    when = "a mean step" if now.state == "ended" else "the last steps"
    bar = [
        element("span", {"class": f"part {part}", "style": f"flex-grow:{share:.4f}"})
        for part, share in shares.items()
    ]
    named = [
        element(
            "span",
            None,
            element("i", {"class": f"part {part}"}),
            f" {part} {share:.0%}, {seconds(now.parts[part])}",
        )
        for part, share in shares.items()
    ]
    words = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
    return element(
        "div",
        {"class": "parts"},
        element("p", None, f"Where the time of {when} went ({seconds(whole)} each):"),
        element("div", {"class": "bar", "role": "img", "aria-label": words}, *bar),
        element("p", {"class": "key"}, *named),
    )


def _late(now: RunNow) -> Markup | None:
    late = now.late
    if now.state == "ended" or late is None:
        return None
    if not matters(late):
        return element("p", None, "No worker makes the others wait.")
    share = late.seconds / late.step
    return element(
        "p",
        {"class": "warning"},
        f"rank {late.rank} on {late.host} is late by {share:.0%} of a step: {late.cause}",
    )


def matters(late: LateRank) -> bool:
    """Whether a worker is as late as the status line says it, too."""
    return late.seconds >= LEAST and late.seconds >= LATE * late.step


def _hosts(now: RunNow) -> Markup | None:
    if not now.cluster:
        return None
    late = now.late.rank if now.late is not None and matters(now.late) else None
    share = (
        {rank: str(share) for rank, share in enumerate(now.shares)}
        if len(now.shares) == now.workers
        else {}
    )
    rows = [
        element(
            "tr",
            None,
            element("th", {"scope": "row"}, host),
            element("td", None, *(_worker(r, share.get(r), late=r == late) for r in ranks)),
        )
        for host, ranks in now.cluster
    ]
    has = f"; samples of each in a batch of {sum(now.shares):,}" if share else ""
    head = f"{counted(now.workers, 'worker')} on {counted(len(now.cluster), 'host')}{has}"
    return element(
        "table", {"class": "hosts"}, element("caption", None, head), element("tbody", None, *rows)
    )


def _worker(rank: int, share: str | None, *, late: bool) -> Markup:
    words = (
        f"rank {rank}" + (f": {share}" if share is not None else "") + (", late" if late else "")
    )
    return join(element("span", {"class": "worker late" if late else "worker"}, words), " ")


def _events(now: RunNow) -> Markup | None:
    if not now.events:
        return None
    rows = [
        element("li", None, element("time", None, spoken(max(time, 0.0))), " ", what)
        for time, what in reversed(now.events[-SHOWN:])
    ]
    return element(
        "div", {"class": "events"}, element("h3", None, "Last events"), element("ol", None, *rows)
    )
