"""What a checkpoint says of itself: its manifest, which is sealed with its own hash, and of which
nothing is believed.

{"format": 1, "step": 40, "serial": 3, "own": [0, 1], "metric": {"best": "min", "value": 0.21},
"files": {...}, "seal": "9f86d0..."}
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from paceline.checkpoint.files import disk
from paceline.checkpoint.files.disk import WrittenFile

FORMAT: Final = 2  # the newest that this paceline reads
UNCUT: Final = 1  # what it writes where nothing is cut, so that older ones read it
MANIFEST: Final = "manifest.json"
NAME: Final = re.compile(r"step-(\d{8,})(\.\d+)?")
_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MOST: Final = 16 << 20  # bytes of a manifest

Best = Literal["min", "max"]
BESTS: Final = get_args(Best)


class Broken(Exception):
    """Why one checkpoint can't be used; another one perhaps can."""


class Newer(Broken):
    """A checkpoint of a newer paceline: it is left alone.

    `serial`: its place in the order of saving, None if that can't be read.
    """

    def __init__(self, version: int, serial: Any) -> None:
        super().__init__(
            f"it is of a newer paceline (format {version}; this one reads up to {FORMAT}), which "
            "has to be there to use it"
        )
        self.serial = serial if type(serial) is int else None


@dataclass(frozen=True)
class Metric:
    """What a checkpoint was measured by, and whether the smallest or the largest is the best.

    What isn't finite is never the best.
    """

    value: float
    best: Best

    @property
    def rank(self) -> float:
        """The key to sort by, the best first."""
        return self.value if self.best == "min" else -self.value

    @property
    def counts(self) -> bool:
        """Whether this can be the best."""
        return math.isfinite(self.value)

    def fields(self) -> dict[str, Any]:
        """Fields of the metric for a manifest."""
        return {"best": self.best, "value": self.value if self.counts else None}

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> Metric | None:
        """Read the metric of a manifest; None where it has none, or something else."""
        found = manifest.get("metric")
        if not isinstance(found, dict) or found.get("best") not in BESTS:
            return None
        value = found.get("value")
        if value is None:
            return Metric(math.nan, found["best"])
        return (
            Metric(float(value), found["best"])
            if type(value) in (int, float) and abs(value) <= 1e308
            else None
        )


def step_of(path: Path) -> int:
    """Return the step that the name of a checkpoint's folder has."""
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def state_files(state: str) -> tuple[str, str]:
    """Return the two files of a state: of all ("") or of one rank."""
    return (
        (f"{state}.json", f"{state}.safetensors")
        if state
        else ("state.json", "tensors.safetensors")
    )


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Write a manifest as the only bytes that are valid for it."""
    body = json.dumps(manifest, sort_keys=True)
    seal = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-1]}, "seal": "{seal}"}}\n'.encode()


def read(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint in `path`. Raises `Broken`."""
    try:
        data = disk.read(path / MANIFEST, _MOST)
        manifest: Any = json.loads(data)
        version = manifest.get("format") if isinstance(manifest, dict) else None
        if type(version) is int and version > FORMAT:
            raise Newer(version, manifest.get("serial"))
        if (
            not isinstance(manifest, dict)
            or manifest.pop("seal", None) is None
            or data != sealed(manifest)
        ):
            raise Broken(f"{MANIFEST} is damaged: it doesn't have the hash it was written with")
    except OSError as error:
        raise Broken(f"{MANIFEST} can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise Broken(f"{MANIFEST} is damaged or half-written") from error
    if type(version) is not int or not UNCUT <= version <= FORMAT:
        raise Broken(
            f"{MANIFEST} is of format {version!r}, and this paceline reads {UNCUT} to {FORMAT}"
        )
    return manifest


def contents(
    path: Path, manifest: Mapping[str, Any]
) -> tuple[int, dict[int, str], dict[str, WrittenFile]]:
    """Read from a manifest the step, the states of single ranks, and the files.

    A name never leads out of the folder. Raises `Broken`.
    """
    step, ranks, files = (manifest.get(name) for name in ("step", "own", "files"))
    if (
        not isinstance(ranks, list)
        or any(type(rank) is not int or rank < 0 for rank in ranks)
        or not isinstance(files, dict)
    ):
        raise Broken(
            f"{MANIFEST} lacks the step, the ranks or the files: "
            "another version of paceline has written it"
        )
    if type(step) is not int or step != step_of(path):
        raise Broken(f"it was saved as step {step!r}, and its folder has been renamed")
    if odd := next((file for file in files if not _FILE.fullmatch(file)), None):
        raise Broken(f"{MANIFEST} names {odd!r}, which is no name of a file in it")
    if odd := next((file for file, wanted in files.items() if not _written(wanted)), None):
        raise Broken(
            f"{MANIFEST} doesn't say what {odd} has to be: "
            "another version of paceline has written it"
        )
    own = {rank: f"own-{rank:05d}" for rank in ranks}
    absent = [
        file for state in ("", *own.values()) for file in state_files(state) if file not in files
    ]
    if absent:
        raise Broken(f"{MANIFEST} doesn't name {', '.join(absent)}, which it has to have")
    return step, own, {file: WrittenFile(**wanted) for file, wanted in files.items()}


def _written(wanted: Any) -> bool:
    return isinstance(wanted, dict) and {field: type(value) for field, value in wanted.items()} == {
        "nbytes": int,
        "sha256": str,
    }
