"""What is installed and how: every dependency is pinned for the tests, and none is left out or
unused.
"""

from __future__ import annotations

import ast
import ctypes
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import paceline
from paceline.native.build import find_zig
from paceline.native.library import VERSION
from tests.harness.sources import TOGETHER, parsed

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {  # where the module is called otherwise
    **{
        "pyzmq": "zmq",
        "pillow": "PIL",
        "mlflow-skinny": "mlflow",
        "prometheus-client": "prometheus_client",
    },
}
# whose packages are imported where they are used
EXTRAS = ("tensorboard", "wandb", "mlflow", "prometheus", "watch")


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;\[ ]", requirement)[0] for requirement in requirements}


def modules(requirements: list[str]) -> set[str]:
    return {NAMES.get(name, name) for name in names(requirements)}


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules of others that are imported by these statements."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"paceline"}


def test_what_is_tested_is_pinned() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[a-z0-9_-]+==[0-9.]+", line) for line in lines)
    extras = PROJECT["optional-dependencies"]
    tested = (extras["test"], extras["test-bridges"], extras["docs"])
    assert names(PROJECT["dependencies"]).union(*map(names, tested)) == names(lines)
    assert "torch==2.13.0" in lines


@TOGETHER
def test_the_plain_install_has_what_the_package_imports() -> None:
    package = ROOT / "paceline"
    paths = {*package.rglob("*.py")} - {*(package / "bridges").rglob("*.py")}
    sources = [parsed(path.read_text()) for path in sorted(paths)]
    plain = modules(PROJECT["dependencies"])
    # in a process of its own
    assert imported(node for source in sources for node in source.tree.body) <= plain | {"aiohttp"}
    extras = set().union(*(modules(PROJECT["optional-dependencies"][name]) for name in EXTRAS))
    assert imported(node for source in sources for node in source.nodes) <= plain | extras


def test_the_version_is_said_once() -> None:
    assert "version" not in PROJECT and re.fullmatch(r"\d+\.\d+\.\d+", paceline.__version__)
    assert f"## {paceline.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_licence_is_there() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def copy_sources(folder: Path) -> Path:
    """Copy what an sdist is made of, without what was built here."""
    source = folder / "source"
    built = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "paceline", source / "paceline", ignore=built)
    (source / "tests").mkdir()  # a second folder with Python in it, as in the repository
    for pattern in ("*.toml", "*.md", "*.txt", "*.in", "setup.py", "LICENSE"):
        for path in ROOT.glob(pattern):
            shutil.copy(path, source)
    return source


def build_distribution(hook: str, source: Path, folder: Path, *options: str) -> Path:
    """Call a hook of the build backend, such as `build_wheel`, as pip does."""
    folder.mkdir(exist_ok=True)
    call = f"build_meta.{hook}({str(folder)!r}, {{'--build-option': {list(options)!r}}})"
    command = [sys.executable, "-c", f"from setuptools import build_meta; {call}"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    (distribution,) = folder.iterdir()
    return distribution


def unpack_library(wheel: Path, folder: Path) -> Path:
    """Unpack the C library, which is the wheel's only file of it: the sources stay out."""
    with zipfile.ZipFile(wheel) as packed:
        names = {n for n in packed.namelist() if n.startswith("paceline/native/")}
        assert {n for n in names if not n.endswith(".py")} == {"paceline/native/_core.so"}
        return Path(packed.extract("paceline/native/_core.so", folder))


def test_an_editable_install_is_a_path_that_type_checkers_read(tmp_path: Path) -> None:
    source = copy_sources(tmp_path)
    wheel = build_distribution("build_editable", source, tmp_path / "built")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".pth")]
        assert Path(packed.read(name).decode().strip()) == source
        assert not [name for name in packed.namelist() if name.endswith(".so")]
    library = source / "paceline" / "native" / "_core.so"  # beside the sources
    assert ctypes.CDLL(str(library)).pl_version() == VERSION


def test_an_sdist_builds_a_wheel_with_the_c_library(tmp_path: Path) -> None:
    sdist = build_distribution("build_sdist", copy_sources(tmp_path), tmp_path / "sdist")
    shutil.unpack_archive(sdist, tmp_path)
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    c_files = {path.name for path in (ROOT / "paceline/native").glob("*.[ch]")}
    assert {path.name for path in (unpacked / "paceline/native").glob("*.[ch]")} == c_files
    assert not (unpacked / "tests").exists()
    wheel = build_distribution("build_wheel", unpacked, tmp_path / "wheel")
    # Any Python will do: the library knows nothing of Python.
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert ctypes.CDLL(str(unpack_library(wheel, tmp_path))).pl_version() == VERSION


@pytest.mark.skipif(find_zig() is None, reason="needs ziglang")
@pytest.mark.parametrize(("machine", "elf_number"), [("x86_64", 62), ("aarch64", 183)])
def test_released_wheels_run_with_an_old_glibc(
    tmp_path: Path, machine: str, elf_number: int
) -> None:
    tag = f"manylinux_2_17_{machine}"
    source, option = copy_sources(tmp_path), f"--plat-name={tag}"
    wheel = build_distribution("build_wheel", source, tmp_path / "wheel", option)
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    library = unpack_library(wheel, tmp_path).read_bytes()
    assert int.from_bytes(library[18:20], "little") == elf_number
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library)
    assert versions and max((int(major), int(minor)) for major, minor in versions) <= (2, 17)


def test_data_files_are_in_the_wheel() -> None:
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["paceline"]
    packed = {path for pattern in files for path in (ROOT / "paceline").glob(pattern)}
    there = [
        path
        for path in (ROOT / "paceline").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".c", ".h", ".so")
    ]
    assert [path for path in there if path not in packed] == []
