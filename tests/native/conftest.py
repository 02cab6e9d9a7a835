"""The C library, compiled for the tests of this folder."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from paceline.native import build


@pytest.fixture(scope="session", params=["dispatched", "portable"])
def library(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> ctypes.CDLL:
    """Build the library, as it is and without the loops that need a newer processor."""
    path = tmp_path_factory.mktemp("native") / f"{request.param}.so"
    compiler = build.find_compiler()
    assert compiler is not None, "no C compiler; pip install ziglang"
    flags = [*build.OPTIMIZATION, *build.DIALECT, *build.WARNINGS, "-Werror", "-shared"]
    flags += ["-DPL_PORTABLE"] if request.param == "portable" else []
    sources = map(str, build.list_sources())
    subprocess.run([*compiler, *flags, "-o", str(path), *sources], check=True)
    return ctypes.CDLL(str(path))
