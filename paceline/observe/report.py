"""Where the time of a run went, and what to do about it, in words."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.observe import serving
from paceline.session.folder import PARTS, Folder
from paceline.session.line import spoken
from paceline.session.slowness import remedy
from paceline.wording import counted, sized

_MEANING = {
    "compute": "forward, backward and the optimizer",
    "exchange": "what could not be hidden behind compute",
    "wait": "for slower workers",
    "data": "for the next batch",
}


@dataclass(frozen=True)
class Facts:
    """What the files of a run say; a run that has not ended lacks what only the summary has."""

    name: str
    ended: bool
    steps: int
    samples: int
    final_loss: float | None
    step_seconds: dict[str, float]
    seconds: float | None = None  # of the whole run
    sync: str = ""
    workers: int = 1
    hosts: int = 1
    rank_seconds: list[dict[str, float]] = field(default_factory=list)
    bytes_sent: dict[str, float] | None = None
    codecs: list[str] = field(default_factory=list)  # whether each paid, in words
    events: list[dict[str, Any]] = field(default_factory=list)
    saves: int = 0  # checkpoints on the disk
    stall: float = 0.0  # seconds for which training stood still for each of them
    write: float = 0.0  # seconds that each took until it was on the disk
    servers: list[serving.Server] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Seconds of a mean step."""
        return sum(self.step_seconds.values())

    def share(self, part: str) -> float:
        """The share of a step that `part` takes."""
        return self.step_seconds[part] / self.step if self.step > 0 else 0.0


def report(folder: Path) -> str:
    """The report on the run in `folder`; of one that has not ended, what is known so far.

    A folder that is not there, is of no run, or has a damaged file raises UsageError.
    """
    facts = read(Folder(folder))
    if facts.steps == 0:
        return f"{_title(facts)}\n\nNo step was finished, so there is nothing to tell about time."
    served = serving.tell(facts.servers, facts.seconds or 0.0, facts.samples)
    blocks = [_title(facts), _times(facts), _traffic(facts), *facts.codecs, served, _checkpoints(facts), _advice(facts), _events(facts)]
    return "\n\n".join(block for block in blocks if block)


# Reading ----------------------------------------------------------------------------------------------------------------------


def read(folder: Folder) -> Facts:
    """The facts of a run: from its summary, or, if it has none yet, from its metrics."""
    if folder.summary.is_file():
        return _from_summary(folder)
    if folder.metrics.is_file():
        return _from_metrics(folder)
    if not folder.path.is_dir():
        runs = sorted(path.parent.name for path in folder.path.parent.glob("*/metrics.jsonl"))
        near = f"runs in {folder.path.parent}: {', '.join(runs[-8:])}" if runs else f"{folder.path.parent} holds no runs"
        raise UsageError(f"there is no run folder {folder.path}; {near}")
    if not any(folder.path.iterdir()):
        return Facts(folder.name, False, 0, 0, None, dict.fromkeys(PARTS, 0.0))
    runs = sorted(path.parent.name for path in folder.path.glob("*/metrics.jsonl"))
    inside = f"; it holds the runs {', '.join(runs[-8:])}: name one of them" if runs else ""
    raise UsageError(f"{folder.path} is no run folder: it has neither {folder.summary.name} nor {folder.metrics.name}{inside}")


def _from_summary(folder: Folder) -> Facts:
    try:
        fields = json.loads(folder.summary.read_text(encoding="utf-8"))
        saved = fields.get("checkpoints") or {"count": 0, "stall_seconds": 0.0, "write_seconds": 0.0}
        each = max(int(saved["count"]), 1)
        return Facts(
            name=folder.name,
            ended=True,
            steps=int(fields["steps"]),
            samples=int(fields["samples"]),
            final_loss=_number(fields["final_loss"]),
            step_seconds={part: float(fields["step_seconds"][part]) for part in PARTS},
            seconds=float(fields["seconds"]),
            sync=str(fields["sync"]),
            workers=int(fields["workers"]),
            hosts=int(fields["hosts"]),
            rank_seconds=[{part: float(rank[part]) for part in PARTS} for rank in fields.get("rank_seconds", [])],
            bytes_sent={where: float(fields["bytes_sent"][where]) for where in ("within", "between")},
            codecs=[str(codec["words"]) for codec in fields.get("codecs", [])],
            events=[{"time": float(event["time"]), "what": str(event["what"])} for event in fields["events"]],
            saves=int(saved["count"]),
            stall=float(saved["stall_seconds"]) / each,
            write=float(saved["write_seconds"]) / each,
            servers=[serving.read(server, number) for number, server in enumerate(fields.get("servers", []))],
        )
    except KeyError as error:
        raise UsageError(f"{folder.summary} lacks {error}: it is not a summary of this version of paceline") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder.summary} is damaged ({error}); remove it, and the report is made of {folder.metrics.name}") from error


def _from_metrics(folder: Folder) -> Facts:
    texts = folder.metrics.read_text(encoding="utf-8").splitlines()
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            if number < len(texts):  # the last may be half-written
                raise UsageError(f"{folder.metrics} is damaged in line {number} ({error}); mend or remove that line") from error
    try:
        steps = [line for line in lines if "seconds" in line]
        losses = [_number(line["loss"]) for line in lines if "loss" in line]
        return Facts(
            name=folder.name,
            ended=False,
            steps=len(steps),
            samples=sum(int(line["samples"]) for line in steps),
            final_loss=losses[-1] if losses else None,
            step_seconds={part: statistics.fmean([float(line["seconds"][part]) for line in steps] or [0.0]) for part in PARTS},
            seconds=max((float(line["time"]) for line in lines), default=None),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{folder.metrics} is not of this version of paceline: {error!r}") from error


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


# Telling ----------------------------------------------------------------------------------------------------------------------


def _title(facts: Facts) -> str:
    took = "" if facts.seconds is None else f" in {spoken(facts.seconds)}"
    loss = "" if facts.final_loss is None else f"; {'final' if facts.ended else 'last'} loss {facts.final_loss:.4g}"
    done = f"{counted(facts.steps, 'step')} of {counted(facts.samples, 'sample')} in all{took}{loss}"
    if not facts.ended:
        return f"{facts.name} has not ended (no summary.json): it is still running, or was broken off. So far: {done}"
    return f"{facts.name}: {facts.sync}, {counted(facts.workers, 'worker')} on {counted(facts.hosts, 'host')}, {done}"


def _times(facts: Facts) -> str:
    rate = f" ({facts.samples / facts.steps / facts.step:,.0f} samples/s)" if facts.step > 0 else ""
    lines = [f"A step took {_seconds(facts.step)}{rate}, mean over steps{' and workers' if facts.workers > 1 else ''}:"]
    for part in PARTS:
        lines.append(f"  {part:<9}{facts.share(part):>5.0%}  {_seconds(facts.step_seconds[part]):>9}  {_MEANING[part]}")
    if facts.ended and facts.seconds:
        outside = facts.seconds - facts.step * facts.steps
        if outside > 0.05 * facts.seconds:
            lines.append(
                f"Outside of steps: {spoken(outside)}, {outside / facts.seconds:.0%} of the run (evaluation, checkpoints, the start)."
            )
    return "\n".join(lines)


def _traffic(facts: Facts) -> str:
    if facts.bytes_sent is None or facts.workers == 1:
        return ""
    within, between = facts.bytes_sent["within"], facts.bytes_sent["between"]
    text = f"All workers together sent {sized(within)} within hosts and {sized(between)} between hosts in a step."
    spent = facts.step_seconds["exchange"]
    if between > 0 and facts.hosts > 1 and spent > 0:
        text += f" Over the exposed exchange that is {between * 8 / facts.hosts / spent / 1e6:,.0f} Mbit/s out of each host."
    return text


def _checkpoints(facts: Facts) -> str:
    if not facts.saves:
        return ""
    once = facts.saves == 1
    return (
        f"{counted(facts.saves, 'checkpoint')}: training stood still for {_seconds(facts.stall)}{'' if once else ' each'}, and "
        f"{'it was' if once else 'they were'} on the disk after {_seconds(facts.write)} of writing{'' if once else ' each'}."
    )


def _advice(facts: Facts) -> str:
    found = [advice for rule in RULES for advice in rule(facts)]
    if not found:
        return f"Nothing stands out: {facts.share('compute'):.0%} of a step is compute."
    return "\n".join(["What to do about it:", *(f"- {advice}" for advice in found)])


def _events(facts: Facts) -> str:
    return "\n".join(["Events:", *(f"  {spoken(event['time']):>7}  {event['what']}" for event in facts.events)]) if facts.events else ""


# What to do about it: each rule looks at one thing ---------------------------------------------------------------------------


def exchange(facts: Facts) -> Iterator[str]:
    """The exchange is exposed for more than a quarter of a step."""
    if facts.share("exchange") <= 0.25:
        return
    yield (
        f"Exchange takes {facts.share('exchange'):.0%} of a step. A larger global batch makes fewer exchanges for the same samples "
        f"(prepare(..., accumulate=k) if memory is short); parameters in bfloat16 halve the bytes"
    )
    if facts.hosts > 1 and "via=" in facts.sync and "hierarchical" not in facts.sync:
        yield f"{facts.sync} names its own way between hosts. AllReduce() and AllReduce(via='hierarchical') send one copy per host"
    elif facts.hosts == 1 and "via=" in facts.sync:
        yield f"{facts.sync} names its own way inside the host. AllReduce() goes through shared memory, which is usually fastest there"
    elif facts.hosts > 1:
        yield "One copy per host is sent already. `paceline bench collectives` says whether the link is as fast as it should be"


def slow(facts: Facts) -> Iterator[str]:
    """Workers wait for one that is slower, or for a different one each time."""
    if facts.share("wait") <= 0.1:
        return
    busy = [rank["compute"] + rank["data"] for rank in facts.rank_seconds]
    middle = statistics.median(busy) if busy else 0.0
    slowest = max(range(len(busy)), key=busy.__getitem__, default=0)
    head = f"Waiting for slower workers takes {facts.share('wait'):.0%} of a step"
    if busy and min(busy) > 0 and busy[slowest] > 1.15 * min(busy):
        yield (
            f"{head}. The slowest is rank {slowest}, with {_seconds(busy[slowest])} of own work in a step where the median is "
            f"{_seconds(middle)}. {remedy(busy)}"
        )
    else:
        yield (
            f"{head}, and no worker is the slowest throughout: batches of unequal work (lengths of texts), or other programs on the "
            f"machines. trace.json, opened in Perfetto (ui.perfetto.dev), shows who was late when"
        )


def data(facts: Facts) -> Iterator[str]:
    """Batches come too slowly."""
    if facts.share("data") > 0.1:
        yield (
            f"The next batch is waited for during {facts.share('data'):.0%} of a step. Let others prepare it: "
            f"DataLoader(..., num_workers=2 or more, persistent_workers=True), or do the costly part of the data set once, ahead"
        )


def outside(facts: Facts) -> Iterator[str]:
    """Much of the run lies outside of its steps."""
    if facts.ended and facts.seconds and facts.seconds > 60 and facts.step * facts.steps < 0.6 * facts.seconds:
        yield (
            f"Only {facts.step * facts.steps / facts.seconds:.0%} of the run was spent in steps: evaluate and save less often, "
            f"or see what the script does before the first"
        )


def checkpoints(facts: Facts) -> Iterator[str]:
    """Training stands still for checkpoints."""
    stood = facts.stall * facts.saves
    if not facts.seconds or stood <= 0.03 * facts.seconds:
        return
    if facts.stall > facts.write / 2:
        yield f"Checkpoints took {stood / facts.seconds:.0%} of the run: run.save(background=True) writes them while training goes on"
    else:
        yield f"Training stood still for checkpoints for {stood / facts.seconds:.0%} of the run: save less often"


def servers(facts: Facts) -> Iterator[str]:
    """See `serving.advise`."""
    return serving.advise(facts.servers, facts.seconds or 0.0, facts.samples)


RULES: tuple[Callable[[Facts], Iterator[str]], ...] = (exchange, slow, data, outside, checkpoints, servers)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
