"""Compiles C programs that test the C library, with sanitizers, or for another processor.

A driver is a program in tests/native that calls the library's functions and returns 0 if all is
well. It is linked with all sources of the library: sanitizers see only what is compiled with them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline.native import build

DRIVERS = Path(__file__).parent.parent / "native"
SANITIZERS = ("address,undefined", "thread")
AARCH64 = "aarch64-linux-musl"  # linked statically, so that no C library for it has to be here


class CompiledLibrary(NamedTuple):
    """The objects of all sources of the library, and the command that made them."""

    compiler: list[str]
    options: list[str]
    objects: list[str]

    def compile_driver(self, source: Path, folder: Path) -> Path:
        """Compile a driver into a folder, link it with the library, and return the program."""
        program = folder / source.stem
        _run_compiler([*self.compiler, *self.options, "-o", program, source, *self.objects])
        return program


def compile_library(
    folder: Path, sanitizer: str | None = None, *, target_triple: str | None = None
) -> CompiledLibrary:
    """Compile the library's sources. Skips the test if this machine has no compiler for it.

    Args:
        folder: Empty folder for the objects.
        sanitizer: One of `SANITIZERS`. Default: none.
        target_triple: See `find_zig` in paceline/native/build.py. Default: this machine.
    """
    compiler = build.find_compiler(target_triple)
    if compiler is None:
        pytest.skip(f"no C compiler for {target_triple or 'this machine'}; pip install ziglang")
    options = [*build.DIALECT, *build.WARNINGS, "-Werror", "-I", str(build.FOLDER)]
    if sanitizer is None:
        options += ["-O2"]
    else:
        options += ["-O1", *build.sanitizer_flags(sanitizer)]
        if not _can_sanitize(compiler, sanitizer):
            pytest.skip(f"{compiler} can't link with -fsanitize={sanitizer}")
    # gcc warns that its thread sanitizer does not know fences. It needs not: the words that our
    # fences order are all atomic, and plain memory is ordered by release and acquire.
    options += ["-Wno-unknown-warning-option", "-Wno-tsan"] if sanitizer == "thread" else []
    options += ["-static"] if target_triple else []
    objects = []
    for source in build.list_sources():
        objects.append(str(folder / f"{source.stem}.o"))
        _run_compiler([*compiler, *options, "-c", "-o", objects[-1], source])
    return CompiledLibrary(compiler, options, objects)


def _run_compiler(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _can_sanitize(compiler: list[str], sanitizer: str) -> bool:
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
    done = _run_program(command, timeout_seconds)
    # The thread sanitizer of some compilers can't start if the kernel spreads addresses widely.
    if "unexpected memory mapping" in done.stderr:
        done = _run_program(["setarch", "-R", *command], timeout_seconds)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"


def _run_program(command: list[str], timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout_seconds
    )
