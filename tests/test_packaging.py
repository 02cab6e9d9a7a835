"""What is installed and how: every dependency is pinned for the tests, and none is left out or
unused.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import paceline
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
    assert names(PROJECT["dependencies"]) | names(extras["test"]) | names(extras["docs"]) == names(
        lines
    )
    assert "torch==2.13.0" in lines


@TOGETHER
def test_the_plain_install_has_what_the_package_imports() -> None:
    sources = [parsed(path.read_text()) for path in (ROOT / "paceline").rglob("*.py")]
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


def test_an_editable_install_is_a_path_that_type_checkers_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "paceline").mkdir(parents=True)
    (source / "tests").mkdir()  # a second folder with Python in it, as in the repository
    for name in ("pyproject.toml", "README.md", "LICENSE", "paceline/__init__.py"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".pth")]
        assert Path(packed.read(name).decode().strip()) == source


def test_data_files_are_in_the_wheel() -> None:
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["paceline"]
    packed = {path for pattern in files for path in (ROOT / "paceline").glob(pattern)}
    there = [
        path
        for path in (ROOT / "paceline").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert [path for path in there if path not in packed] == []
