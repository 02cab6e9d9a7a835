"""Compiles C programs that test the C library, with sanitizers, or for another processor.

A driver is a program in tests/native that calls the library's functions and returns 0 if all is
well. It is linked with all sources of the library: sanitizers see only what is compiled with them.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from paceline.native import build

DRIVERS = Path(__file__).parent.parent / "native"
SANITIZERS = ("address,undefined", "thread")
AARCH64 = "aarch64-linux-musl"  # linked statically, so that no C library for it has to be here


def compile_driver(
    name: str, folder: Path, sanitizer: str | None = None, *, target_triple: str | None = None
) -> Path:
    """Compile tests/native/<name>.c with all sources of the library, and return the program.

    Skips the test if this machine has no compiler for it.

    Args:
        name: Name of the driver, such as "driver_version".
        folder: Folder for the program.
        sanitizer: One of `SANITIZERS`. Default: none.
        target_triple: See `find_zig` in paceline/native/build.py. Default: this machine.
    """
    compiler = build.find_compiler(target_triple)
    if compiler is None:
        pytest.skip(f"no C compiler for {target_triple or 'this machine'}; pip install ziglang")
    if sanitizer is not None and not can_sanitize(tuple(compiler), sanitizer):
        pytest.skip(f"{compiler} can't link with -fsanitize={sanitizer}")
    program = folder / name
    options = [*build.DIALECT, *build.WARNINGS, "-Werror", "-I", str(build.FOLDER)]
    options += build.sanitizer_flags(sanitizer) if sanitizer else []
    # gcc warns that its thread sanitizer knows nothing of fences. It needs not: the words that
    # our fences order are all atomic, and plain memory is ordered by release and acquire.
    options += ["-Wno-unknown-warning-option", "-Wno-tsan"] if sanitizer == "thread" else []
    options += ["-O1" if sanitizer else "-O2", *(["-static"] if target_triple else [])]
    sources = [str(DRIVERS / f"{name}.c"), *map(str, build.list_sources())]
    command = [*compiler, *options, "-o", str(program), *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


@cache
def can_sanitize(compiler: tuple[str, ...], sanitizer: str) -> bool:
    """Whether a compiler has the libraries of a sanitizer."""
    command = [*compiler, f"-fsanitize={sanitizer}", "-x", "c", "-", "-o", "/dev/null"]
    return not subprocess.run(
        command, input=b"int main(void) { return 0; }", capture_output=True, check=False
    ).returncode


def find_emulator() -> str:
    """Find the program that runs those of aarch64. Skips the test if it isn't installed."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("no qemu-aarch64; apt-get install qemu-user-static")
    return emulator


def run_driver(program: Path, *, emulator: str | None = None, timeout_seconds: float = 60) -> None:
    """Run a driver. A driver that fails fails the test.

    Args:
        program: What `compile_driver` returned.
        emulator: Program that runs those of other processors. Default: none.
        timeout_seconds: How long the driver may take.
    """
    command = [*([emulator] if emulator else []), str(program)]
    done = _run(command, timeout_seconds)
    # The thread sanitizer of some compilers can't start if the kernel spreads addresses widely.
    if "unexpected memory mapping" in done.stderr:
        done = _run(["setarch", "-R", *command], timeout_seconds)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"


def _run(command: list[str], timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout_seconds
    )
