"""The folder of a run that has something for every section of its page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from paceline.record.outcome.goodput import GOODPUT_PARTS, compute_percent
from paceline.trace import STEP_PARTS
from paceline.unequal.stragglers.causes import CAUSES
from tests.harness.finished_runs import finished

STEPS: Final = 60
PARTS_OF: Final = {"compute": 0.05, "exchange": 0.03, "wait": 0.015, "data": 0.005}
GOODPUT: Final = dict.fromkeys(GOODPUT_PARTS, 0) | {"useful": 15, "start": 1, "repeated": 4}
EVENTS: Final = [
    {"time": 2.5, "what": "rank 1 was lost: 1 worker went on after 0.21 s (view 2)"},
    {"time": 3.5, "what": "rank 1 has come: 2 workers go on (view 3)"},
    {"time": 4.0, "what": "kill(rank=1, step=25)", "event": "fault", "step": 25},
]
LINK: Final = {
    **{"step": 40, "hosts": ["B"], "rate": 2e6, "usual": 1e8, "gain": 1.3},
    **{
        "words": "exchanges take 30.0 ms: the link of B carries 16 Mbit/s",
        "advice": "AllReduce(codec=int8()) would help",
    },
}


def member(worker: int, rank: int | None, host: str, first: int, last: int) -> dict[str, Any]:
    """One who took part in such a run."""
    found = {
        "worker": worker,
        "host": host,
        "rank": rank,
        "steps": last - first + 1,
        "first_step": first,
        "last_step": last,
    }
    return {
        **found,
        "seconds": PARTS_OF,
        "late": 0.002 * worker,
        "bytes_sent": {"within": 1e5, "between": 2e5 + worker},
    }


def whole(tmp_path: Path, **changes: Any) -> Path:
    """A run of two workers on two hosts, of which one was lost and another came, with a cut
    model, checkpoints and a slow link.
    """
    held = {
        "predicted": {"parameters": 1000, "gradients": 1000, "optimizer": None},
        "peak": 300_000_000,
    }
    fields: dict[str, Any] = {
        "hosts": 2,
        "bytes_sent": {"within": 2e5, "between": 4e5},
        "members": [
            member(0, 0, "A", 1, 60),
            member(1, None, "B", 1, 25),
            member(2, 1, "B", 36, 60),
        ],
        "late": [{cause: 0.001 * at * (cause == "stolen") for cause in CAUSES} for at in range(3)],
        "work": [{"seconds": 0.05, "late": 0.0}, {"seconds": 0.08, "late": 0.9}],
        "events": EVENTS,
        "saves": [{"time": 3.0, "what": "saved step-00000030", "step": 30}],
        "checkpoints": {
            "count": 2,
            "stall_seconds": 0.3,
            "write_seconds": 0.6,
            "nbytes": 5e6,
            "background": 1,
        },
        "loader": {"num_workers": 0, "shares": [40, 24]},
        "mesh": {"data": 1, "shard": 2},
        "places": [{"data": 0, "shard": 0}, {"data": 0, "shard": 1}],
        "axes": {"shard": {"seconds": 0.02, "within": 1e5, "between": 3e5}},
        "memory": [
            {**held, "measured": {"parameters": 1000 + rank, "gradients": 1000, "optimizer": 2000}}
            for rank in range(2)
        ],
        "links": [LINK],
        "codecs": [{"words": "int8() sent a quarter."}],
        "settings": {
            "script": "train.py",
            "arguments": ["--lr", "0.1", "data"],
            "optimizers": [{"name": "AdamW", "lr": 0.1}],
            "seed": 7,
        },
        "results": {"auc": 0.8},
        "goodput": {"seconds": GOODPUT, "percent": compute_percent(GOODPUT)},
        "log_began": 0.2,
    }
    members = changes.pop("members", fields.pop("members"))
    folder = finished(tmp_path, PARTS_OF, [PARTS_OF] * STEPS, **{**fields, **changes})
    add_members(folder, members)
    lines = [line(step) for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def add_members(folder: Path, members: list[dict[str, Any]]) -> None:
    """Put those who took part into a summary."""
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "members": members}))


def line(step: int) -> dict[str, Any]:
    """A step of such a run, every tenth with a look at each worker."""
    found: dict[str, Any] = {
        "step": step,
        "time": 0.1 * step,
        "loss": 3 / math.sqrt(step),
        "val/accuracy": 1 - 1 / step,
    }
    found |= {
        "samples": 64,
        "seconds": PARTS_OF,
        "bytes_sent": {"within": 200_000, "between": 400_000},
    }
    if step % 10 == 0:
        there = ("0", "1") if step <= 25 else ("0", "2") if step >= 36 else ("0",)
        found["ranks"] = {
            name: [10, *(10 * PARTS_OF[part] for part in STEP_PARTS), 0.1 * int(name)]
            for name in there
        }
    return found
