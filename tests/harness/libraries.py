"""What a job of programs/torch_libraries.py prints: libraries on torch.distributed, with each of
two backends.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
LIBRARIES, BUCKETS = PROGRAMS / "torch_libraries.py", PROGRAMS / "ddp_buckets.py"


def check_alike(output: str) -> None:
    """Check that Gloo and paceline, as the job was given them, have come to the same results."""
    line = next(line for line in output.splitlines() if "FOUND " in line)
    wanted, found = json.loads(line.partition("FOUND ")[2])
    assert (wanted.pop("backend"), found.pop("backend")) == ("gloo", "paceline")
    for name, value in wanted.items():
        assert (
            found[name] == pytest.approx(value, rel=1e-6, abs=1e-6)
            if isinstance(value[0], float)
            else found[name] == value
        ), name
