"""The C library is built when its sources change, by the compiler that there is."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.native import build as real_build
from paceline.native.library import VERSION

AARCH64 = 183  # number of the processor in the header of an ELF file


@pytest.fixture
def build(tmp_path: Path) -> ModuleType:
    """Copy two sources with build.py, and load the copy."""
    for name in ("build.py", "core.h", "version.c"):
        shutil.copy(real_build.FOLDER / name, tmp_path / name)
    spec = importlib.util.spec_from_file_location("copied_build", tmp_path / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hide_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "/nonexistent")


def run_script(build: ModuleType) -> subprocess.CompletedProcess[str]:
    """Run the copy as a program. It sees no installed packages, so it never sees ziglang."""
    command = [sys.executable, "-I", "-S", build.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def read_stamp(library: Path) -> str:
    function = ctypes.CDLL(str(library)).pl_stamp
    function.restype = ctypes.c_char_p
    stamp: bytes = function()
    return stamp.decode()


def test_it_is_built_once(build: ModuleType) -> None:
    assert build.build_library(build.LIBRARY)
    assert not build.build_library(build.LIBRARY)
    assert ctypes.CDLL(str(build.LIBRARY)).pl_version() == VERSION
    assert read_stamp(build.LIBRARY).startswith(build.stamp_sources())


@pytest.mark.parametrize("name", ["version.c", "core.h", "build.py"])
def test_it_is_built_again_when_a_source_changes(build: ModuleType, name: str) -> None:
    build.build_library(build.LIBRARY)
    with (build.FOLDER / name).open("a") as file:
        file.write("// changed\n" if name != "build.py" else "# changed\n")
    assert not read_stamp(build.LIBRARY).startswith(build.stamp_sources())
    assert build.build_library(build.LIBRARY)


def test_it_is_built_again_by_another_compiler(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build_library(build.LIBRARY)
    compiler = build.find_system_compiler()
    monkeypatch.setenv("CC", f"{compiler[0]} -DANYTHING")
    assert build.find_system_compiler() == [compiler[0], "-DANYTHING"]
    assert build.build_library(build.LIBRARY)


def test_without_a_compiler_the_library_of_these_sources_will_do(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "built" in run_script(build).stdout
    hide_compilers(monkeypatch, tmp_path)
    done = run_script(build)
    assert done.returncode == 0 and "up to date" in done.stdout


def test_without_a_compiler_the_error_says_what_to_install(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hide_compilers(monkeypatch, tmp_path)
    done = run_script(build)
    assert done.returncode == build.NO_COMPILER and "pip install ziglang" in done.stderr
    assert done.stderr.count("\n") == 1 and not build.LIBRARY.exists()


def test_sources_that_do_not_compile_leave_the_library(build: ModuleType) -> None:
    build.build_library(build.LIBRARY)
    before = build.LIBRARY.read_bytes()
    (build.FOLDER / "version.c").write_text("int broken = ;\n")
    done = run_script(build)
    assert done.returncode == 1 and "version.c:1" in done.stderr
    assert build.LIBRARY.read_bytes() == before
    assert [path.name for path in build.FOLDER.glob("*.so*")] == ["_core.so"]


def test_a_folder_without_sources_is_an_error(build: ModuleType) -> None:
    (build.FOLDER / "version.c").unlink()
    with pytest.raises(build.BuildError, match="no C sources"):
        build.build_library(build.LIBRARY)


@pytest.mark.skipif(real_build.find_zig() is None, reason="needs ziglang")
def test_zig_compiles_when_there_is_no_other_compiler_and_for_other_processors(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other.so"
    build.build_library(other, target_triple="aarch64-linux-gnu.2.17")
    assert int.from_bytes(other.read_bytes()[18:20], "little") == AARCH64
    hide_compilers(monkeypatch, tmp_path)
    assert build.build_library(build.LIBRARY)
    assert ctypes.CDLL(str(build.LIBRARY)).pl_version() == VERSION
