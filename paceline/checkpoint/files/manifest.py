"""Reads and writes the manifest of a checkpoint: it has its own hash, and each field is checked.

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

NEWEST_FORMAT: Final = 2  # the newest format that this paceline reads
UNCUT_FORMAT: Final = 1  # written if nothing is cut, so that older versions can read it
MANIFEST_FILE: Final = "manifest.json"
FOLDER_NAME: Final = re.compile(r"step-(\d{8,})(\.\d+)?")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_MANIFEST_BYTES: Final = 16 << 20  # bytes of a manifest

Best = Literal["min", "max"]
BEST_CHOICES: Final = get_args(Best)


class BrokenCheckpoint(Exception):
    """A checkpoint can't be used. Another one may be complete."""


class NewerCheckpoint(BrokenCheckpoint):
    """A checkpoint was written by a newer paceline. It can't be used, and is never removed.

    `serial` is its place in the order of saving, or None if that can't be read.
    """

    def __init__(self, version: int, serial: Any) -> None:
        super().__init__(
            f"it is of a newer paceline (format {version}; this one reads up to {NEWEST_FORMAT}): "
            "install a newer version to use it"
        )
        self.serial = serial if type(serial) is int else None


@dataclass(frozen=True)
class Metric:
    """Metric of a checkpoint, and whether the smallest or the largest value is the best.

    A value that isn't finite is never the best.
    """

    value: float
    best: Best

    @property
    def sort_key(self) -> float:
        """Sort key that puts the best value first."""
        return self.value if self.best == "min" else -self.value

    @property
    def is_finite(self) -> bool:
        """Whether this value can be the best."""
        return math.isfinite(self.value)

    def to_fields(self) -> dict[str, Any]:
        """Fields of the metric for a manifest."""
        return {"best": self.best, "value": self.value if self.is_finite else None}

    @staticmethod
    def from_manifest(manifest: Mapping[str, Any]) -> Metric | None:
        """Read the metric of a manifest; None if it has none, or one that makes no sense."""
        fields = manifest.get("metric")
        if not isinstance(fields, dict) or fields.get("best") not in BEST_CHOICES:
            return None
        value = fields.get("value")
        if value is None:
            return Metric(math.nan, fields["best"])
        return (
            Metric(float(value), fields["best"])
            if type(value) in (int, float) and abs(value) <= 1e308
            else None
        )


def parse_step(path: Path) -> int:
    """Parse the step from the name of a checkpoint's folder."""
    match = FOLDER_NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def get_state_files(state: str) -> tuple[str, str]:
    """Names of the two files of a state. The name of the shared state is empty."""
    return (
        (f"{state}.json", f"{state}.safetensors")
        if state
        else ("state.json", "tensors.safetensors")
    )


def seal_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Write a manifest with its seal. Other bytes for the same fields count as damaged."""
    body = json.dumps(manifest, sort_keys=True)
    seal = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-1]}, "seal": "{seal}"}}\n'.encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint in `path`. Raises `BrokenCheckpoint`."""
    try:
        data = disk.read_file(path / MANIFEST_FILE, _MAX_MANIFEST_BYTES)
        manifest: Any = json.loads(data)
        version = manifest.get("format") if isinstance(manifest, dict) else None
        if type(version) is int and version > NEWEST_FORMAT:
            # Checked before the seal, as newer versions may seal in another way.
            raise NewerCheckpoint(version, manifest.get("serial"))
        if (
            not isinstance(manifest, dict)
            or manifest.pop("seal", None) is None
            or data != seal_manifest(manifest)
        ):
            raise BrokenCheckpoint(
                f"{MANIFEST_FILE} is damaged: it doesn't have the hash it was written with"
            )
    except OSError as error:
        raise BrokenCheckpoint(f"{MANIFEST_FILE} can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{MANIFEST_FILE} is damaged or half-written") from error
    if type(version) is not int or not UNCUT_FORMAT <= version <= NEWEST_FORMAT:
        raise BrokenCheckpoint(
            f"{MANIFEST_FILE} is of format {version!r}, and this paceline reads {UNCUT_FORMAT} to "
            f"{NEWEST_FORMAT}"
        )
    return manifest


def parse_contents(
    path: Path, manifest: Mapping[str, Any]
) -> tuple[int, dict[int, str], dict[str, WrittenFile]]:
    """Parse the step, the names of the states of single ranks, and the files of a manifest.

    No file name leads out of the folder. Raises `BrokenCheckpoint`.
    """
    step, ranks, files = (manifest.get(name) for name in ("step", "own", "files"))
    if (
        not isinstance(ranks, list)
        or any(type(rank) is not int or rank < 0 for rank in ranks)
        or not isinstance(files, dict)
    ):
        raise BrokenCheckpoint(
            f"{MANIFEST_FILE} lacks the step, the ranks or the files: "
            "another version of paceline has written it"
        )
    if type(step) is not int or step != parse_step(path):
        raise BrokenCheckpoint(f"it was saved as step {step!r}, and its folder has been renamed")
    # A damaged or hostile manifest must not lead to files outside of the checkpoint.
    if bad_name := next((file for file in files if not _FILE_NAME.fullmatch(file)), None):
        raise BrokenCheckpoint(
            f"{MANIFEST_FILE} names {bad_name!r}, which is not a valid file name"
        )
    if bad_name := next(
        (file for file, written in files.items() if not _is_written_file(written)), None
    ):
        raise BrokenCheckpoint(
            f"{MANIFEST_FILE} doesn't have the size and hash of {bad_name}: "
            "another version of paceline has written it"
        )
    state_names = {rank: f"own-{rank:05d}" for rank in ranks}
    missing = [
        file
        for state in ("", *state_names.values())
        for file in get_state_files(state)
        if file not in files
    ]
    if missing:
        raise BrokenCheckpoint(
            f"{MANIFEST_FILE} doesn't name {', '.join(missing)}, which each checkpoint has"
        )
    return step, state_names, {file: WrittenFile(**written) for file, written in files.items()}


def _is_written_file(fields: Any) -> bool:
    return isinstance(fields, dict) and {field: type(value) for field, value in fields.items()} == {
        "nbytes": int,
        "sha256": str,
    }
