"""The C library of reductions and codecs, compiled once for all tests of this folder."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "paceline" / "native"
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")


@pytest.fixture(scope="session", params=["dispatched", "portable"])
def library(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Build the library, as it is and without the loops that need a newer processor."""
    path = tmp_path_factory.mktemp("native") / f"{request.param}.so"
    flags = [*FLAGS, *(["-DPL_PORTABLE"] if request.param == "portable" else [])]
    subprocess.run(
        ["cc", *flags, "-o", path, SOURCES / "reduce.c", SOURCES / "codecs.c"], check=True
    )
    return ctypes.CDLL(str(path))
