"""A virtual environment for each peer, made on request under .bench/; all of them see the torch
that the driver's own environment has.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
BENCH = ROOT / ".bench"
DIGITS = BENCH / "digits.pt"
LIMIT = 2400.0  # seconds that one pip may take


class InstallError(RuntimeError):
    """A peer can't be installed; the text is a short reason for its row."""


@dataclass(frozen=True)
class Source:
    """A package that is built from its source, after `changes` to files: (glob, pattern,
    replacement).
    """

    requirement: str
    changes: tuple[tuple[str, str, str], ...]
    environ: Mapping[str, str]


SOURCES = {
    "horovod": Source(
        "horovod==0.28.1",
        # what torch's headers need today
        (("**/CMakeLists.txt", r"CMAKE_CXX_STANDARD 14\)", "CMAKE_CXX_STANDARD 17)"),),
        {
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITH_GLOO": "1",
        },
    )
}


def python_of(name: str | None) -> Path:
    """The interpreter of an environment; None is the driver's own."""
    return Path(sys.executable) if name is None else BENCH / name / "bin" / "python"


def made(name: str | None) -> bool:
    """Whether the environment is there, from the requirements as they are now."""
    mark = BENCH / str(name) / ".made"
    return name is None or (mark.exists() and mark.read_text() == _fingerprint(name))


def requirement(name: str) -> str:
    """What an environment is made from, as pip takes it."""
    return (HERE / "requirements" / f"{name}.txt").read_text().strip()


def make(name: str) -> None:
    """Make an environment anew.

    Raises `InstallError` with the last line that pip or the build said.
    """
    folder = BENCH / name
    shutil.rmtree(folder, ignore_errors=True)
    BENCH.mkdir(exist_ok=True)
    _call([sys.executable, "-m", "venv", str(folder)], f"{name}: venv")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise InstallError(
            f"{sys.executable} has no torch: run the driver in the environment that paceline is "
            "installed in"
        )
    packages = Path(
        _call(
            [str(python_of(name)), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            "venv",
        ).strip()
    )
    (packages / "torch-of-the-driver.pth").write_text(f"{Path(torch.origin).parent.parent}\n")
    _pip(
        name,
        "install",
        "-c",
        str(ROOT / "constraints.txt"),
        "-r",
        str(HERE / "requirements" / f"{name}.txt"),
    )
    if name in SOURCES:
        _build(name, SOURCES[name])
    (folder / ".made").write_text(_fingerprint(name))


def write_digits() -> None:
    """Put scikit-learn's digits where environments with only torch can read them."""
    if not made("digits"):
        make("digits")
    written = DIGITS.with_suffix(".new")
    _call(
        [str(python_of("digits")), str(HERE / "programs" / "export_digits.py"), str(written)],
        "digits",
    )
    written.rename(DIGITS)


def last_words(text: str) -> str:
    """The line of a failed command's output that says most, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.match(r"(\w+\.)*\w*(error|exception)\b", line, re.IGNORECASE)
    ]
    said = (errors or lines or ["no output"])[-1]
    return said if len(said) <= 160 else f"{said[:157]}..."


def _build(name: str, source: Source) -> None:
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        folder = Path(temporary)
        flags = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")
        _pip(name, "download", *flags, "-d", temporary, source.requirement)
        archive = next(folder.glob("*.tar.gz"))
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        tree = next(path for path in folder.iterdir() if path.is_dir())
        for glob, pattern, replacement in source.changes:
            for path in tree.glob(glob):
                path.write_text(re.sub(pattern, replacement, path.read_text()))
        # its own cmake first
        here = {**source.environ, "PATH": f"{BENCH / name / 'bin'}:{os.environ['PATH']}"}
        _pip(name, "install", "--no-build-isolation", "--no-deps", str(tree), environ=here)


def _pip(name: str, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
    _call([str(python_of(name)), "-m", "pip", "--quiet", *arguments], f"{name}: pip", environ)


def _call(command: list[str], what: str, environ: Mapping[str, str] | None = None) -> str:
    """The output of a command, run with low priority."""
    try:
        done = subprocess.run(
            ["nice", *command],
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{what} was not done after {LIMIT:g} s") from error
    if done.returncode:
        raise InstallError(last_words(done.stdout + done.stderr))
    return done.stdout


def _fingerprint(name: str) -> str:
    text = (
        (HERE / "requirements" / f"{name}.txt").read_text() + repr(SOURCES.get(name)) + sys.version
    )
    return hashlib.sha256(text.encode()).hexdigest()
