"""A launcher with the request that the command line holds as JSON; it ends as the request ended."""

from __future__ import annotations

import json
import sys

from paceline.cluster.launcher.launch import run_job
from paceline.cluster.launcher.request import LaunchRequest

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    code = run_job(LaunchRequest(**{**asked, "args": tuple(asked.get("args", ()))}))
    assert "torch" not in sys.modules, "the launcher has imported torch"
    sys.exit(code)
