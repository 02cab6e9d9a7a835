"""Each C driver beside this file passes with sanitizers, and on another processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.native_drivers import (
    AARCH64,
    DRIVERS,
    SANITIZERS,
    CompiledLibrary,
    compile_library,
    find_emulator,
    run_driver,
)

NAMES = sorted(path.stem for path in DRIVERS.glob("driver_*.c"))
# Drivers of one compiled library run in one process of the tests: it is compiled once.
IN_GROUPS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SANITIZERS]


@pytest.fixture(scope="module")
def sanitized(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CompiledLibrary:
    return compile_library(tmp_path_factory.mktemp("sanitized"), request.param)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompiledLibrary, str]:
    """Compile for aarch64. At first it takes half a minute: zig makes and keeps a C library."""
    emulator = find_emulator()
    folder = tmp_path_factory.mktemp("foreign")
    return compile_library(folder, target_triple=AARCH64), emulator


@pytest.mark.parametrize("sanitized", IN_GROUPS, indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_driver_passes_with_sanitizers(
    name: str, sanitized: CompiledLibrary, tmp_path: Path
) -> None:
    run_driver(sanitized.compile_driver(DRIVERS / f"{name}.c", tmp_path))


@pytest.mark.parametrize("sanitized", IN_GROUPS[:1], indirect=True)
def test_sanitizers_are_on(sanitized: CompiledLibrary, tmp_path: Path) -> None:
    source = tmp_path / "wrong.c"
    source.write_text("int main(int n, char **v) { (void)v; return 1 << (n + 40) ? 0 : 0; }\n")
    with pytest.raises(AssertionError, match="shift exponent 41"):
        run_driver(sanitized.compile_driver(source, tmp_path))


@pytest.mark.timeout(900)  # the first compilation is long on a busy machine
@pytest.mark.xdist_group("aarch64")
@pytest.mark.parametrize("name", NAMES)
def test_driver_passes_on_aarch64(
    name: str, foreign: tuple[CompiledLibrary, str], tmp_path: Path
) -> None:
    compiled, emulator = foreign
    run_driver(compiled.compile_driver(DRIVERS / f"{name}.c", tmp_path), emulator=emulator)
