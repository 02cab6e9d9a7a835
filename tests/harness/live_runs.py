"""What the folder of a run says while it is under way, as a run would write it."""

from __future__ import annotations

from typing import Any

PARTS = {"compute": 0.06, "exchange": 0.02, "wait": 0.01, "data": 0.01}


def facts(**changes: Any) -> dict[str, Any]:
    """What `live.json` has."""
    live = {
        "step": 40,
        "total_steps": 100,
        "cluster": [{"host": "a", "ranks": [0, 1]}, {"host": "b", "ranks": [2]}],
        "origins": [0, 1, 3],
        "recent": {"steps": 10, "samples": 640, **PARTS},
        "late": {"rank": 2, "host": "b", "seconds": 0.05, "step": 0.1, "cause": "compute"},
        "link": "the link of b slow: 10 Mbit/s",
    } | changes.pop("live", {})
    found = {
        "sync": "AllReduce()",
        "workers": 3,
        "hosts": 2,
        "steps": 38,
        "samples": 2432,
        "seconds": 12.5,
        "samples_per_second": 500.0,
        "final_loss": 1.5,
        "step_seconds": dict.fromkeys(PARTS, 0.1),
        "loader": {"num_workers": 0, "shares": [16, 16, 32]},
        "checkpoints": {"count": 2},
        "events": [
            {"time": 3.0, "what": "rank 2 was lost"},
            {"time": 9.0, "what": "shares are now 16 + 16 + 32"},
        ],
        "saves": [{"time": 5.0, "what": "saved step-00000020", "step": 20}],
        "links": [],
        "live": live,
    }
    return found | changes
