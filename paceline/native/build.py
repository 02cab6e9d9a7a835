"""Builds the C library beside this file: `python paceline/native/build.py`.

It needs the standard library alone and imports nothing of paceline, since setup.py loads it before
anything is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "_core.so"
NO_COMPILER = 3  # exit code, for the Makefile
SUPPORTED = sys.platform == "linux"  # the sources use futexes and epoll

# No -march=native: a wheel runs on other processors too, so the sources choose at run time.
# No contraction: a fused multiply-add rounds once where two operations round twice, and results
# must not depend on the compiler.
DIALECT = ("-std=c11", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
WARNINGS = ("-Wall", "-Wextra")
OPTIMIZATION = ("-O3",)
# A trivial source with the headers that ours need: a compiler without the C library's is useless.
PROBE = "#include <pthread.h>\n#include <stdatomic.h>\nint pl_probe(void) { return 0; }\n"


class BuildError(RuntimeError):
    """The library can't be built. The message says why, in one line."""


class CompilerMissing(BuildError):
    """There is no C compiler that works."""


def list_sources() -> list[Path]:
    """List all C files of the library, in a fixed order."""
    return sorted(FOLDER.glob("*.c"))


def sanitizer_flags(sanitizer: str) -> list[str]:
    """Flags that check memory at run time: `sanitizer` is "address,undefined" or "thread"."""
    return [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]


def find_system_compiler() -> list[str] | None:
    """Find a C compiler of this machine that works: $CC, cc, gcc or clang, or None."""
    candidates = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(PROBE)
        options = [*DIALECT, "-shared", "-o", f"{folder}/probe.so", str(source)]
        for compiler in filter(None, candidates):
            try:
                subprocess.run([*compiler, *options], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            return compiler
    return None


def find_zig(target_triple: str | None = None) -> list[str] | None:
    """Find the compiler of the package ziglang, or None if the package isn't installed.

    Args:
        target_triple: What it compiles for, such as "aarch64-linux-gnu.2.17", where the last part
            is the oldest glibc that the library runs with. Default: this machine, as it is.
    """
    if importlib.util.find_spec("ziglang") is None:
        return None
    # Without -mcpu=baseline zig would use all instructions of this very processor. Without -s the
    # library would hold a megabyte of debug information about zig's own parts.
    target = ["-target", target_triple] if target_triple else ["-mcpu=baseline"]
    return [sys.executable, "-m", "ziglang", "cc", *target, "-s"]


def find_compiler(target_triple: str | None = None) -> list[str] | None:
    """Find the compiler's command: the system's, or zig if there is none or for other machines."""
    return (None if target_triple else find_system_compiler()) or find_zig(target_triple)


def stamp_sources(sanitizer: str | None = None, target_triple: str | None = None) -> str:
    """Stamp of the sources and of how they are compiled. Arguments: see `build_library`."""
    options = (DIALECT, WARNINGS, OPTIMIZATION, sanitizer, target_triple, platform.machine())
    digest = hashlib.sha256(repr(options).encode())
    for path in sorted([*FOLDER.glob("*.[ch]"), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"sources={digest.hexdigest()[:16]}"


def stamp_compiler(compiler: Sequence[str]) -> str:
    """Stamp of a compiler and its version."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(repr(compiler).encode() + version)
    return f"compiler={digest.hexdigest()[:16]}"


def build_library(
    target: Path, *, sanitizer: str | None = None, target_triple: str | None = None
) -> bool:
    """Compile the C sources into one shared library, unless it is up to date.

    The library holds the stamp of its sources, so there is no second file to keep in step with it.

    Args:
        target: Path of the library.
        sanitizer: "address,undefined", or "thread". Default: none.
        target_triple: See `find_zig`. Default: this machine.

    Returns:
        Whether the library had to be compiled.

    Raises:
        CompilerMissing: There is no compiler.
        BuildError: The sources don't compile.
    """
    compiler = find_compiler(target_triple)
    if not list_sources():
        raise BuildError(f"{FOLDER} has no C sources; run this in paceline's source tree")
    stamps = [stamp_sources(sanitizer, target_triple)]
    stamps += [stamp_compiler(compiler)] if compiler else []
    if target.exists() and all(stamp.encode() in target.read_bytes() for stamp in stamps):
        return False  # without a compiler: built when there was one
    if compiler is None:
        raise CompilerMissing(
            "no C compiler works here ($CC, cc, gcc, clang and the Python package ziglang were "
            "tried); install one, such as with: pip install ziglang"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the target, then renamed: two processes may build at once.
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    options = [*OPTIMIZATION, "-shared", *DIALECT, *WARNINGS, f'-DPL_STAMP="{" ".join(stamps)}"']
    options += sanitizer_flags(sanitizer) if sanitizer else []
    command = [*compiler, *options, "-o", str(temporary), *map(str, list_sources())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        sys.stderr.write(done.stderr)  # warnings too
        if done.returncode:
            tried = shlex.join(command)
            raise BuildError(f"the C library doesn't compile, see above; tried: {tried}")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return True


if __name__ == "__main__":
    try:
        if not SUPPORTED:
            print(f"not built: the C library is for Linux, and this is {sys.platform}")
        else:
            print(f"{LIBRARY}: {'built' if build_library(LIBRARY) else 'up to date'}")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(NO_COMPILER if isinstance(error, CompilerMissing) else 1)
