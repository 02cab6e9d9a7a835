"""The folder of a run, and the summary that ends it.

runs/NAME/
  metrics.jsonl   a line for each step        trace.json    what happened when, for Perfetto
  summary.json    written when the run ends   checkpoints/  what it can go on from
  live.json       while it is under way: what is known of the summary, and where it is
  media.jsonl     histograms and images       media/        the images
  .name           in NAME-7: which name was asked for, as NAME-7 may be the seventh run called NAME,
                  or the first called NAME-7
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

if TYPE_CHECKING:  # so that reading a run's folder doesn't import torch
    from paceline.comm.agreement import Agreement

KINDS: Final = ("parameters", "gradients", "optimizer")  # what a worker holds
LAYOUT: Final = "layout.json"  # what each worker would hold, which `paceline layout` asks for
_ASKED: Final = ".name"
_NUMBERED: Final = re.compile(r"(.+)-(\d+)")


def script() -> str:
    """Return the name of the script that this process runs."""
    return Path(sys.argv[0]).name if sys.argv else ""


def prove(name: str) -> None:
    """Raise `UsageError` if no run can have this name."""
    if (
        not name
        or name.startswith(".")
        or any(sign in name for sign in "/\\")
        or not name.isprintable()
    ):
        raise UsageError(
            f"a run can't be called {name!r}: give a name without slashes and control characters "
            "that doesn't start with a dot, or none"
        )


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    `earlier` are those of runs that asked for the same name before, newest first; `named`: the name
    was given, and isn't the date and time.
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
        """Path of the summary, which is there once the run has ended."""
        return self.path / "summary.json"

    @property
    def live(self) -> Path:
        """Path of what is known while the run is under way, see `paceline.record.live`."""
        return self.path / "live.json"

    @property
    def media(self) -> Path:
        """Path of the histograms and images that were logged: JSON lines, one for each."""
        return self.path / "media.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Path of the folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def script(self) -> str | None:
        """Name of the script that made this run, as its summary or `live.json` tells it; None
        where neither does.
        """
        for path, part in ((self.summary, "settings"), (self.live, "live")):
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
                found = (json.loads(path.read_text(encoding="utf-8")).get(part) or {}).get("script")
                if found is not None:
                    return str(found)
        return None

    @staticmethod
    def create(root: Path, name: str | None, *, say: Callable[[str], None]) -> RunFolder:
        """Make the folder of a new run in `root`.

        A name that is taken becomes NAME-2, NAME-3, ..., and `say` is told.

        Without a name it is the date and time. Raises `UsageError` for a name that no run can have,
        and for a place that can't be written.
        """
        wanted = time.strftime("%Y%m%d-%H%M%S") if name is None else name
        prove(wanted)
        try:
            root.mkdir(parents=True, exist_ok=True)
            earlier = _earlier(root, wanted) if name is not None else ()
            path = _made(root, wanted)
            if name is not None and _NUMBERED.fullmatch(path.name):
                (path / _ASKED).write_text(name, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"the run's folder {root / wanted} can't be made ({_reason(root, error)}); "
                "give start(folder=...) a place for it"
            ) from error
        if path.name != wanted and name is not None:
            say(f"there is a run {wanted} already: this one is {path.name}")
        return RunFolder(path, earlier, name is not None)

    @staticmethod
    def again(path: Path, name: str | None) -> RunFolder:
        """Return the folder of a run whose job has started again, and that was given this name."""
        earlier = () if name is None else _earlier(path.parent, name)
        return RunFolder(
            path, earlier[earlier.index(path) + 1 :] if path in earlier else (), name is not None
        )

    @staticmethod
    def agree(
        agreement: Agreement, root: Path, name: str | None, *, say: Callable[[str], None]
    ) -> RunFolder:
        """Let the first worker `create` the folder, for all: the path is the same everywhere,
        and a failure ends all. Collective.
        """

        def make() -> bytes:
            folder = RunFolder.create(root, name, say=say)
            return bytes(msgpack.packb([str(folder.path), [str(path) for path in folder.earlier]]))

        path, earlier = msgpack.unpackb(agreement.tell("the run's folder", make))
        return RunFolder(Path(path), tuple(map(Path, earlier)), name is not None)


def _made(root: Path, wanted: str) -> Path:
    """Make a new folder in `root`, which exists: of that name, or with a number behind it.

    Raises `OSError`.
    """
    for number in itertools.count(1):
        path = root / (wanted if number == 1 else f"{wanted}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("numbers never end")


def _reason(root: Path, error: OSError) -> str:
    """Say why no folder can be made in `root`."""
    if root.is_symlink() and not root.exists():
        return f"{root} is a link to {os.readlink(root)}, which is not there"
    return "Not a directory" if isinstance(error, FileExistsError) else str(error.strerror)


def _earlier(root: Path, name: str) -> tuple[Path, ...]:
    """List the runs that were called so, newest first; not those that were called NAME-2 by
    somebody.
    """
    numbers = {1: root / name} if (root / name).is_dir() else {}
    for path in root.glob(f"{glob.escape(name)}-*"):
        match = _NUMBERED.fullmatch(path.name)
        if match and match[1] == name and path.is_dir() and _asked(path) in (name, None):
            numbers[int(match[2])] = path
    return tuple(numbers[number] for number in sorted(numbers, reverse=True))


def _asked(path: Path) -> str | None:
    """Return the name that was asked for when a numbered folder was made; None where that isn't
    known.
    """
    try:
        return (path / _ASKED).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class RunTotals:
    """Totals over all steps of a run.

    Seconds of a step are means over steps and workers, and its parts add up to the whole step.
    """

    steps: int  # taken in this run, those before a resume not counted
    samples: int
    seconds: float  # of the whole run, with what lay between steps
    samples_per_second: float | None  # inside steps; None without a step
    final_loss: float | None
    step_seconds: dict[str, float]
    rank_seconds: list[dict[str, float]]  # step_seconds of each rank
    # of each rank, see `paceline.unequal.stragglers.stragglers.unequal`
    rank_work: list[dict[str, float]] = field(default_factory=list)
    # of each rank: seconds of a mean step by which it was late, by cause
    rank_late: list[dict[str, float]] = field(default_factory=list)
    # all who took part, see `paceline.record.outcome.members.RunMembers`
    members: list[dict[str, Any]] = field(default_factory=list)
    # the last value of everything that was logged
    logged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSummary:
    """The fields of `summary.json`."""

    sync: str  # in the notation
    workers: int
    hosts: int
    totals: RunTotals
    bytes_sent: dict[str, float]  # by all workers, in a step: "within" hosts, and "between" them
    # whether each codec in use paid: the fields of `paceline.sync.codec_cost.CodecVerdict`
    codecs: list[dict[str, Any]]
    parameters_sha256: str
    # the fields of `paceline.checkpoint.saving.SaveTally`, and the "best" if there is one
    checkpoints: dict[str, Any]
    # joins, losses, recoveries: at least {"time": seconds since the start, "what": text}
    events: list[dict[str, Any]]
    # the last checkpoints, as events with their "step"
    saves: list[dict[str, Any]] = field(default_factory=list)
    # messages, bytes, staleness, what was dropped
    servers: list[dict[str, Any]] = field(default_factory=list)
    # how the training loader was dealt: num_workers, and the shares of a usual batch
    loader: dict[str, Any] | None = None
    # the size of each axis, if a model was cut; then also
    mesh: dict[str, int] = field(default_factory=dict)
    places: list[dict[str, int]] = field(default_factory=list)  # where each rank was on the axes
    # a step's exchange by axis: "seconds", a mean, and all bytes sent
    axes: dict[str, dict[str, float]] = field(default_factory=dict)
    # what each rank held (`paceline.record.memory`)
    memory: list[dict[str, Any]] = field(default_factory=list)
    # when times in metrics.jsonl are 0, in the seconds of events: what joining took
    log_began: float = 0.0
    # causes of lateness that could not be told on some worker
    untold: list[str] = field(default_factory=list)
    # the way between hosts that a measured cluster has decided
    # (`paceline.sync.route_choice.RouteChoice`)
    route: dict[str, Any] | None = None
    # that became slow (`paceline.unequal.probe.link_watch`)
    links: list[dict[str, Any]] = field(default_factory=list)
    # of each (`paceline.record.pipeline_profile`)
    pipelines: list[dict[str, Any]] = field(default_factory=list)
    # what was asked for (`paceline.record.outcome.settings`)
    settings: dict[str, Any] = field(default_factory=dict)
    # what the script has put into `Run.results`
    results: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the file, those of `totals` among them."""
        fields = dict(vars(self))  # `asdict` would copy all that is in them
        totals = vars(fields.pop("totals"))
        return {"sync": self.sync, "workers": self.workers, "hosts": self.hosts, **totals, **fields}

    def write(self, folder: RunFolder) -> None:
        """Write the file in full or not at all."""
        write_whole(folder.summary, strict_json(self.fields(), indent=2) + "\n")


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """Write `value` as strict JSON, with the names of nan and infinities in their place."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(tame(value), indent=indent)


def tame(value: Any) -> Any:
    """Return `value` as strict JSON allows it: nan and infinities become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: tame(item) for key, item in value.items()}
    return [tame(item) for item in value] if isinstance(value, list | tuple) else value


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader finds the old content or the new, never a part."""
    temporary = beside(path)
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing can be removed
            temporary.unlink()
        raise unwritten(path, error) from error


def beside(path: Path) -> Path:
    """Return a name beside `path` for what is being written, which nobody can guess: a link that
    lies there might lead to any file.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def unwritten(path: Path, error: OSError) -> ResourceError:
    """Return the error for a file of a run that can't be written."""
    return ResourceError(
        f"{path} could not be written ({error.strerror}); free some space, or give "
        "start(folder=...) another place"
    )
