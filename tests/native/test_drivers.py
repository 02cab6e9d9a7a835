"""Each C driver beside this file passes with sanitizers, and on another processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.native_drivers import (
    AARCH64,
    DRIVERS,
    SANITIZERS,
    compile_driver,
    find_emulator,
    run_driver,
)

NAMES = sorted(path.stem for path in DRIVERS.glob("driver_*.c"))


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_driver_passes_with_sanitizers(name: str, sanitizer: str, tmp_path: Path) -> None:
    run_driver(compile_driver(name, tmp_path, sanitizer))


@pytest.mark.parametrize("name", NAMES)
def test_driver_passes_on_aarch64(name: str, tmp_path: Path) -> None:
    emulator = find_emulator()
    # The first of them takes half a minute: zig compiles a C library for aarch64, and keeps it.
    program = compile_driver(name, tmp_path, target_triple=AARCH64)
    run_driver(program, emulator=emulator)


def test_sanitizers_are_on(tmp_path: Path) -> None:
    folder = tmp_path / "drivers"
    folder.mkdir()
    source = folder / "driver_wrong.c"
    source.write_text("int main(int n, char **v) { (void)v; return 1 << (n + 40) ? 0 : 0; }\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.harness.native_drivers.DRIVERS", folder)
        program = compile_driver("driver_wrong", tmp_path, "address,undefined")
    with pytest.raises(AssertionError, match="shift exponent 41"):
        run_driver(program)
