"""The part of docs/results.md on losses, and its pictures, from the records."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.learning.catalogue import RACE, TABLE, TUNING, WARM, Way
from benchmarks.parts import write_part
from benchmarks.peers import environments
from benchmarks.peers.environments import InstallError
from benchmarks.peers.records import Record, Records


def make(results: Path, docs: Path) -> None:
    """Write the page, its data and its pictures into `docs`."""
    records = Records(results)
    batches = sorted(
        {
            record["batch"]
            for record in _known(records, "learning", TABLE)
            if record["seed"] != TUNING
        }
    )
    tables = {str(batch): rows for batch in batches if (rows := _table(records, batch))}
    found = {"tables": tables, "race": _race(records), "headers": list(records.each("header"))}
    if not found["tables"] and not found["race"]:
        sys.exit(
            f"{results} has no runs: make some first, "
            "with python -m benchmarks.learning table, or race"
        )
    data = docs / "pictures" / "learning.json"
    data.write_text(json.dumps(found) + "\n")
    try:
        if not environments.made("pictures"):
            environments.make("pictures")
    except InstallError as error:
        sys.exit(f"the pictures need matplotlib, and it can't be installed: {error}")
    program = Path(__file__).with_name("draw.py")
    subprocess.run(
        [str(environments.python_of("pictures")), str(program), str(data), str(data.parent)],
        check=True,
    )
    page = write_part(docs, "learning", "python -m benchmarks.learning report", text(found))
    print(f"written: {page} and {data.parent}")


def _known(records: Records, kind: str, ways: dict[str, Way]) -> list[Record]:
    """The records of the ways as they are in the catalogue now."""
    return [
        record
        for record in records.each(kind)
        if record["way"] in ways and ways[record["way"]].sync == record["sync"]
    ]


def _table(records: Records, batch: int) -> list[dict[str, Any]]:
    """A row for each way: final losses by seed, and how much worse than exact they are, seed by
    seed.
    """
    runs: dict[str, dict[int, Record]] = defaultdict(dict)
    for record in _known(records, "learning", TABLE):
        if record["seed"] != TUNING and record["batch"] == batch:
            runs[record["way"]][record["seed"]] = record
    exact = {seed: run["validation"][-1][2] for seed, run in runs["exact"].items()}
    rows = []
    for way in TABLE.values():
        mine = {seed: run for seed, run in sorted(runs[way.name].items()) if seed in exact}
        if mine:
            losses = {seed: run["validation"][-1][2] for seed, run in mine.items()}
            worse = statistics.fmean(loss / exact[seed] - 1 for seed, loss in losses.items())
            first = next(iter(mine.values()))
            rows.append(
                {
                    "title": way.title,
                    "sync": way.sync,
                    "bound": way.bound,
                    "losses": losses,
                    "worse": worse,
                    "sent": first["sent"],
                    "warm": way.warm,
                    "curve": first["losses"],
                    "rate": first["rate"],
                    "steps": first["steps"],
                }
            )
    return rows


def _race(records: Records) -> list[dict[str, Any]]:
    """A row for each way: when it was where DDP ended."""
    runs = {record["way"]: record for record in _known(records, "race", RACE)}
    if "ddp" not in runs:
        return []
    goal = runs["ddp"]["validation"][-1][2]
    rows = []
    for way in RACE.values():
        if way.name in runs:
            run = runs[way.name]
            there = next(
                ((steps, seconds) for steps, seconds, loss in run["validation"] if loss <= goal),
                None,
            )
            row = {
                "name": way.name,
                "title": way.title,
                "sync": way.sync,
                "curve": run["validation"],
                "sent": run["sent"],
            }
            rows.append(
                row | {"goal": goal, "steps": there and there[0], "seconds": there and there[1]}
            )
    return rows


def spread(rows: list[dict[str, Any]]) -> float:
    """How far the losses of exact lie apart over seeds, as a part of the smallest."""
    losses = list(rows[0]["losses"].values())
    return (max(losses) - min(losses)) / min(losses)


def text(found: dict[str, Any]) -> str:
    """The part of the page."""
    parts = []
    if found["race"]:
        parts.append(_tell_race(found["race"]))
    if found["tables"]:
        first = next(iter(found["tables"].values()))
        parts.append(_tell_tables(first[0]["steps"]))
        parts += [_tell_table(rows, batch) for batch, rows in found["tables"].items()]
    machine = found["headers"][-1]["machine"]
    parts.append(
        f"Machine: {machine['processor']}, {machine['cores']} cores, one thread in each process; "
        "the workers share its cores."
    )
    return "\n\n".join(parts) + "\n"


def _tell_race(rows: list[dict[str, Any]]) -> str:
    ddp = rows[0]
    lines = [
        "| | seconds | steps | ms a step | sent in a step | times as fast as DDP |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in sorted(rows, key=lambda row: row["seconds"] or 1e9):
        steps, seconds, _ = row["curve"][-1]
        pace, sent = f"{seconds / steps * 1e3:.0f}", f"{row['sent'] / 1e6:.2f} MB"
        name = f"`{row['sync']}`" if row["sync"] else row["title"]
        if row["seconds"] is None:
            lines.append(f"| {name} | not within {steps} steps | | {pace} | {sent} | |")
        else:
            faster = ddp["seconds"] / row["seconds"]
            lines.append(
                f"| {name} | {row['seconds']:.0f} | {row['steps']} | {pace} | {sent} | "
                f"{faster:.1f} |"
            )
    table = "\n".join(lines)
    return f"""## Time to a loss, on slow links

Four hosts of one worker each, on links of 100 Mbit/s (`wan-100m`, a [lab](lab.md)). The model is
a GPT of 3.5 M parameters on
the standard library's sources, 8 samples of 64 tokens in a step, AdamW at 0.001. The table has
the time until the validation
loss is {ddp["goal"]:.4f}, which DDP has after {ddp["steps"]} steps. The clock stands still while
the loss is taken.
`python -m benchmarks.learning race`

![Validation loss against seconds](pictures/learning-race.png)

{table}"""


def _tell_tables(steps: int) -> str:
    return f"""## The loss after as many steps

A GPT of 0.9 M parameters on the standard library's sources, windows of 64 tokens, {steps} steps,
4 workers. All ways have the
same weights at the start, the same order of the data, and the same learning rate: the best of
those tried for exact sums.
It falls to a tenth by a cosine. `after({WARM}, ...)` means exact sums in the first {WARM} steps.
`python -m benchmarks.learning table`

`half` and `int8` are as good as exact sums, and gossip nearly so. A codec that sends a hundredth
keeps the rest for later, and
the delay costs: little if gradients are mostly noise (small batches, late in training), much if
all steps go the same way
(large batches, early), and most from the first step on. So start with exact sums. Without error
feedback top-k is worse still.
Signs are not: Adam divides by the size of gradients anyway."""


def _tell_table(rows: list[dict[str, Any]], batch: str) -> str:
    wide = spread(rows)
    seeds = ", ".join(map(str, rows[0]["losses"]))
    lines = [
        "| | validation loss, by seed | against exact | bound | sent in a step |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"].values())
        bound = "" if row["bound"] is None else f"{max(row['bound'], wide):.1%}"
        missed = (
            " (missed)"
            if row["bound"] is not None and row["worse"] > max(row["bound"], wide)
            else ""
        )
        worse, sent = f"{row['worse']:+.2%}{missed}", f"{row['sent'] / 1e6:.2f} MB"
        lines.append(f"| `{row['sync']}` | {losses} | {worse} | {bound} | {sent} |")
    table = "\n".join(lines)
    return f"""{batch} samples in a step, {int(batch) // 4} of each worker. Seeds {seeds}; learning rate {rows[0]["rate"]:g}.
Exact losses lie {wide:.1%} apart over the seeds; if that is more than a bound, it is the bound.

![Loss against steps and bytes](pictures/learning-{batch}.png)

{table}"""  # noqa: E501
