"""From records to one JSON document: for each cell a row for each peer, with medians, spread,
and ratios to paceline.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ratio
from benchmarks.peers.catalogue import MODELS, PEERS, SETTINGS, Peer
from benchmarks.peers.checks import WORDS
from benchmarks.peers.records import Record, Records

OURS = "paceline"


def summarise(records: Records, peers: Sequence[str]) -> dict[str, Any]:
    """All cells that have records, in the catalogue's order; of a cell measured with other steps
    or seeds, only the latest.
    """
    headers = list(records.each("header"))
    broken = {
        record["environment"]: record["why"]
        for record in records.each("environment")
        if record["why"] is not None
    }
    cells = []
    for setting in SETTINGS:
        for model in MODELS:
            mine = [
                record for record in records.each("round") if record["cell"] == f"{setting}/{model}"
            ]
            if mine:
                latest = max(mine, key=lambda record: str(record["when"]))
                same = [
                    record
                    for record in mine
                    if (record["steps"], record["seed"]) == (latest["steps"], latest["seed"])
                ]
                cells.append(_cell(same, records, [PEERS[name] for name in peers], broken))
    last = headers[-1] if headers else {}
    return {
        "benchmark": "peers",
        **{name: last.get(name) for name in ("when", "command", "machine", "versions")},
        "runs": [{name: header[name] for name in ("when", "command")} for header in headers],
        "cells": cells,
    }


def write(path: Path, summary: dict[str, Any]) -> None:
    """The summary as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """The summary in a .json file, or that of the records in a .jsonl file."""
    if not path.exists():
        raise SystemExit(f"there is no {path}: measure first, with python -m benchmarks.peers")
    if path.suffix == ".jsonl":
        return summarise(Records(path), list(PEERS))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _cell(
    rounds: Sequence[Record], records: Records, peers: Sequence[Peer], broken: dict[str, str]
) -> dict[str, Any]:
    """What was measured of a model in a setting."""
    setting, model = rounds[0]["cell"].split("/")
    of: dict[str, list[Record]] = {peer.name: [] for peer in peers}
    for record in rounds:
        of.setdefault(record["peer"], []).append(record)
    rows = [
        _row(peer, of[peer.name], of.get(OURS, []), setting, broken)
        for peer in peers
        if peer.only in (None, setting)
    ]
    steps, seed = rounds[0]["steps"], rounds[0]["seed"]
    buckets = records.find("buckets", cell=f"{setting}/{model}", steps=steps, seed=seed)
    references = [
        {"alone": record["alone"], "moved": record["moved"]}
        for record in records.each("reference")
        if (record["model"], record["workers"], record["steps"], record["seed"])
        == (model, SETTINGS[setting].workers, steps, seed)
    ]
    return {
        "setting": setting,
        "model": model,
        "workers": SETTINGS[setting].workers,
        "steps": steps,
        "seed": seed,
        "buckets_ms": None
        if buckets is None
        else {size: s * 1e3 for size, s in buckets["tried"].items()},
        "reference": references[-1] if references else None,
        "rows": [row for row in rows if row["rounds"] or row["why"]],
        "unmeasured": [row["peer"] for row in rows if not row["rounds"] and not row["why"]],
    }


def _row(
    peer: Peer,
    rounds: Sequence[Record],
    ours: Sequence[Record],
    setting: str,
    broken: dict[str, str],
) -> dict[str, Any]:
    """One peer in one cell. A failed round takes the time away from the whole row."""
    row: dict[str, Any] = {
        "peer": peer.name,
        "title": peer.title,
        "launcher": peer.launcher,
        "check": WORDS[peer.check],
        "note": peer.note,
    }
    row |= {
        "why": None,
        "rounds": len(rounds),
        "median": None,
        "low": None,
        "high": None,
        "ratio": None,
        "sent": None,
        "away": None,
    }
    failed = [record for record in rounds if record["why"] is not None]
    row["versions"] = next((record["versions"] for record in rounds if "versions" in record), None)
    if failed:
        return row | {"why": failed[0]["why"]}
    if not rounds:
        missing = broken.get(peer.environment or "")
        return row | {"why": f"not installed: {missing}" if missing else None}
    steps = [record["step"] for record in rounds]
    low, _, high = (
        statistics.quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else (steps[0],) * 3
    )
    row |= {"median": statistics.median(steps), "low": low, "high": high, "samples": steps}
    row |= {
        "sent": statistics.median(record["sent"] for record in rounds),
        "away": max(record["away"] for record in rounds),
        "loss": rounds[-1]["losses"][-1],
        "bucket": rounds[-1]["bucket"],
    }
    beside = {record["round"]: record["step"] for record in ours if record["why"] is None}
    both = [
        (record["step"], beside[record["round"]]) for record in rounds if record["round"] in beside
    ]
    if both and peer.name != OURS:
        row["ratio"] = ratio([theirs for theirs, _ in both], [own for _, own in both])._asdict()
    return row
