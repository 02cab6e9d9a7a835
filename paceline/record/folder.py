"""The folder of a run, and the summary that ends it.

runs/NAME/
  metrics.jsonl   one line for each step      trace.json    timeline of all ranks, for Perfetto
  summary.json    written when the run ends   checkpoints/  saved states that a run can resume from
  live.json       the summary so far, and the current state, while the run is under way
  media.jsonl     histograms and images       media/        the images
  .name           in a folder NAME-7: the requested name, because NAME-7 may be the seventh run
                  called NAME, or the first run called NAME-7
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgpack

from paceline.errors import ResourceError, UsageError

# Only for types, so that reading a run's folder doesn't import torch.
if TYPE_CHECKING:
    from paceline.comm.agreement import Agreement

# Kinds of memory that a worker holds for a model.
MEMORY_KINDS: Final = ("parameters", "gradients", "optimizer")
# What each worker would hold of a model; written for `paceline layout`.
LAYOUT_FILE: Final = "layout.json"
_NAME_FILE: Final = ".name"
_NUMBERED_NAME: Final = re.compile(r"(.+)-(\d+)")


def script_name() -> str:
    """Return the name of the script that this process runs."""
    return Path(sys.argv[0]).name if sys.argv else ""


def check_run_name(name: str) -> None:
    """Raise `UsageError` if a run can't have this name."""
    if (
        not name
        or name.startswith(".")
        or any(sign in name for sign in "/\\")
        or not name.isprintable()
    ):
        raise UsageError(
            f"a run can't be called {name!r}: give a name without slashes and control characters, "
            "which doesn't start with a dot, or leave the name out"
        )


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: Path of the folder.
        earlier: Folders of earlier runs that requested the same name, newest first.
        named: Whether the user gave the name. If not, it is the date and time.
    """

    path: Path
    earlier: tuple[Path, ...] = ()
    named: bool = True

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def metrics(self) -> Path:
        """Path of the metrics: JSON lines, one for each step."""
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        """Path of the timeline of all ranks on one clock, in Chrome's trace format."""
        return self.path / "trace.json"

    @property
    def summary(self) -> Path:
        """Path of the summary, which exists once the run has ended."""
        return self.path / "summary.json"

    @property
    def live(self) -> Path:
        """Path of the file with the current state of the run, see `paceline.record.live`."""
        return self.path / "live.json"

    @property
    def media(self) -> Path:
        """Path of the logged histograms and images: JSON lines, one for each."""
        return self.path / "media.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Path of the folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def script(self) -> str | None:
        """Script of this run, from its summary or `live.json`; None if neither says it."""
        for path, field_name in ((self.summary, "settings"), (self.live, "live")):
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
                script_name = (
                    json.loads(path.read_text(encoding="utf-8")).get(field_name) or {}
                ).get("script")
                if script_name is not None:
                    return str(script_name)
        return None

    @staticmethod
    def create_folder(root: Path, name: str | None, *, say: Callable[[str], None]) -> RunFolder:
        """Create the folder of a new run in `root`.

        If the name is taken, the folder becomes NAME-2, NAME-3, and so on, and `say` gets a
        message.

        Args:
            root: Folder of all runs. It is created if it does not exist.
            name: Name of the run. None for the date and time.
            say: Function that shows a message to the user.

        Raises:
            UsageError: A run can't have this name, or the folder can't be written.
        """
        wanted = time.strftime("%Y%m%d-%H%M%S") if name is None else name
        check_run_name(wanted)
        try:
            root.mkdir(parents=True, exist_ok=True)
            earlier = _find_earlier_runs(root, wanted) if name is not None else ()
            path = _make_numbered_folder(root, wanted)
            if name is not None and _NUMBERED_NAME.fullmatch(path.name):
                (path / _NAME_FILE).write_text(name, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"the run's folder {root / wanted} can't be created "
                f"({_explain_failure(root, error)}); give another "
                "place, start(folder=...)"
            ) from error
        if path.name != wanted and name is not None:
            say(f"there is a run {wanted} already: this one is {path.name}")
        return RunFolder(path, earlier, name is not None)

    @staticmethod
    def reopen_folder(path: Path, name: str | None) -> RunFolder:
        """Return the folder of a run whose job has started again with this name."""
        earlier = () if name is None else _find_earlier_runs(path.parent, name)
        # Runs that started after this one are not earlier ones, although they have the same name.
        return RunFolder(
            path, earlier[earlier.index(path) + 1 :] if path in earlier else (), name is not None
        )

    @staticmethod
    def create_together(
        agreement: Agreement, root: Path, name: str | None, *, say: Callable[[str], None]
    ) -> RunFolder:
        """Let the first worker create the folder for all workers. Collective.

        All workers get the same path. If it can't be created, all of them raise.
        """

        def make() -> bytes:
            folder = RunFolder.create_folder(root, name, say=say)
            return bytes(msgpack.packb([str(folder.path), [str(path) for path in folder.earlier]]))

        path, earlier = msgpack.unpackb(agreement.tell_everyone("the run's folder", make))
        return RunFolder(Path(path), tuple(map(Path, earlier)), name is not None)


def _make_numbered_folder(root: Path, wanted: str) -> Path:
    """Create a new folder in `root`, with a number after its name if the name is taken."""
    for attempt in itertools.count(1):
        # `mkdir` fails if the folder exists, so two runs that start at once never share one.
        path = root / (wanted if attempt == 1 else f"{wanted}-{attempt}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("numbers never end")


def _explain_failure(root: Path, error: OSError) -> str:
    """Explain why no folder can be created in `root`."""
    if root.is_symlink() and not root.exists():
        return f"{root} is a link to {os.readlink(root)}, which is not there"
    return "Not a directory" if isinstance(error, FileExistsError) else str(error.strerror)


def _find_earlier_runs(root: Path, name: str) -> tuple[Path, ...]:
    """List the runs that requested this name, newest first."""
    path_by_number = {1: root / name} if (root / name).is_dir() else {}
    # NAME-2 counts only if NAME was requested. A run that was itself called NAME-2 does not.
    # Folders without the name file count, too.
    for path in root.glob(f"{glob.escape(name)}-*"):
        match = _NUMBERED_NAME.fullmatch(path.name)
        if (
            match
            and match[1] == name
            and path.is_dir()
            and _read_requested_name(path) in (name, None)
        ):
            path_by_number[int(match[2])] = path
    return tuple(path_by_number[suffix] for suffix in sorted(path_by_number, reverse=True))


def _read_requested_name(path: Path) -> str | None:
    """Return the name that was requested for a numbered folder; None if that isn't known."""
    try:
        return (path / _NAME_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class RunTotals:
    """Totals over all steps of a run.

    Seconds of a step are means over steps and workers. The parts of a step add up to the whole
    step. The field names are those of `summary.json`.
    """

    # Taken in this run, without the steps before a resume.
    steps: int
    samples: int
    # Of the whole run, including the time between steps.
    seconds: float
    samples_per_second: float | None  # inside steps; None without a step
    final_loss: float | None
    step_seconds: dict[str, float]
    rank_seconds: list[dict[str, float]]  # step_seconds of each rank
    # Of each rank, see `paceline.unequal.stragglers.stragglers.measure_inequality`.
    rank_work: list[dict[str, float]] = field(default_factory=list)
    # Of each rank: seconds of a mean step by which it was late, by cause.
    rank_late: list[dict[str, float]] = field(default_factory=list)
    # All workers that took part, see `paceline.record.outcome.members.RunMembers`.
    members: list[dict[str, Any]] = field(default_factory=list)
    # Last value of each logged name.
    logged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSummary:
    """The fields of `summary.json`. They keep their names, so that old runs stay readable."""

    sync: str  # in the notation
    workers: int
    hosts: int
    totals: RunTotals
    # Sent by all workers in a step: "within" hosts and "between" hosts.
    bytes_sent: dict[str, float]
    # Whether each codec paid: the fields of `paceline.sync.codec_cost.CodecVerdict`.
    codecs: list[dict[str, Any]]
    parameters_sha256: str
    # The fields of `paceline.checkpoint.saving.SaveTally`, and the "best" checkpoint if there is
    # one.
    checkpoints: dict[str, Any]
    # Joins, losses and recoveries: at least {"time": seconds since the start, "what": text}.
    events: list[dict[str, Any]]
    # The last checkpoints, as events with their "step".
    saves: list[dict[str, Any]] = field(default_factory=list)
    # Messages, bytes, staleness and dropped work of each server.
    servers: list[dict[str, Any]] = field(default_factory=list)
    # How the training loader was dealt: "num_workers", and the "shares" of a usual batch.
    loader: dict[str, Any] | None = None
    # Size of each axis, if a model was cut. The next two fields are then filled, too.
    mesh: dict[str, int] = field(default_factory=dict)
    # Coordinates of each rank on the axes.
    places: list[dict[str, int]] = field(default_factory=list)
    # Exchange of a step by axis: "seconds", a mean over workers, and the bytes of all workers.
    axes: dict[str, dict[str, float]] = field(default_factory=dict)
    # What each rank held, see `paceline.record.held_memory`.
    memory: list[dict[str, Any]] = field(default_factory=list)
    # Seconds from the start of the run (where events begin) to time 0 of metrics.jsonl: the time
    # that joining took.
    log_began: float = 0.0
    # Causes of lateness that could not be told apart on some worker.
    untold: list[str] = field(default_factory=list)
    # Route between hosts that a measured cluster decided: the fields of
    # `paceline.sync.route_choice.RouteChoice`.
    route: dict[str, Any] | None = None
    # Links that became slow, see `paceline.unequal.probe.link_watch`.
    links: list[dict[str, Any]] = field(default_factory=list)
    # One entry for each pipeline, see `paceline.record.pipeline_profile`.
    pipelines: list[dict[str, Any]] = field(default_factory=list)
    # Where the time of all workers went, see `paceline.record.outcome.goodput`.
    goodput: dict[str, Any] = field(default_factory=dict)
    # Settings of the run, see `paceline.record.outcome.settings`.
    settings: dict[str, Any] = field(default_factory=dict)
    # Contents of `Run.results`, which the script fills.
    results: dict[str, Any] = field(default_factory=dict)

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of the file. The fields of `totals` are merged in."""
        # `asdict` would copy everything in the fields.
        fields = dict(vars(self))
        totals = vars(fields.pop("totals"))
        return {"sync": self.sync, "workers": self.workers, "hosts": self.hosts, **totals, **fields}

    def write(self, folder: RunFolder) -> None:
        """Write the file completely or not at all."""
        write_atomically(folder.summary, to_strict_json(self.to_fields(), indent=2) + "\n")


def to_strict_json(value: Any, *, indent: int | None = None) -> str:
    """Write `value` as strict JSON. NaN and infinities become their names, as strings."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(replace_nonfinite(value), indent=indent)


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities in `value` by their names, which strict JSON allows."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    return [replace_nonfinite(item) for item in value] if isinstance(value, list | tuple) else value


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader finds either the old content or the new."""
    temporary = temporary_path(path)
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            # The data has to be on the disk before the rename, or a loss of power could leave an
            # empty file under the final name.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # A disk that refuses to write may refuse this, too.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise write_error(path, error) from error


def temporary_path(path: Path) -> Path:
    """Return a path next to `path` for a temporary file.

    The name can't be guessed, so no one can put a symbolic link there that leads to another file.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def write_error(path: Path, error: OSError) -> ResourceError:
    """Return the error for a file of a run that can't be written."""
    return ResourceError(
        f"{path} could not be written ({error.strerror}); free some space, or give "
        "start(folder=...) another place"
    )
