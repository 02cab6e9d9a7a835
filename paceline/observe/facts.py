"""The facts of a run, read from its files: its summary, and, step by step, its metrics."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.cluster.mesh import Mesh
from paceline.errors import UsageError
from paceline.observe import serving
from paceline.observe.metrics import Floats, MetricsReader
from paceline.record.folder import KINDS, RunFolder
from paceline.record.live import GONE, alive
from paceline.record.pipeline_profile import PipelineProfile
from paceline.trace import PARTS
from paceline.unequal.stragglers.causes import CAUSES

# first steps that are left out; stretches that are compared; fewer steps tell nothing for sure
WARM, TENTHS, FEWEST = 5, 10, 25

LARGEST = 64 << 20  # bytes of a summary
MOST = {"workers": 1 << 14, "hosts": 1 << 14, "events": 100_000, "saves": 100_000}  # in a summary
_AXIS = ("seconds", "within", "between")


@dataclass(frozen=True)
class DealingFacts:
    """How the training loader was dealt."""

    num_workers: int = 0  # processes that read ahead, for each worker
    shares: tuple[int, ...] = ()  # of a usual batch; empty where there is no usual one


@dataclass(frozen=True)
class OwnWork:
    """The work of a worker by itself, apart from exchange and waiting."""

    seconds: float  # in a step, the median
    # the share of the steps in which it was a tenth above what is usual among the workers
    late: float


@dataclass(frozen=True)
class LinkFacts:
    """A link between hosts that became slow."""

    step: int  # at which that was noticed
    words: str
    advice: str  # empty where nothing is known that would help
    hosts: tuple[str, ...]  # whose links they are; of two hosts the one between them
    rate: float  # bytes that it carries in a second
    usual: float | None  # what others carry, where there are others
    gain: float | None  # how many times as fast steps would be with what is advised


@dataclass(frozen=True)
class AxisFacts:
    """The exchanges of a step along one axis of the mesh."""

    axis: str
    seconds: float  # for which a worker stood still, the mean
    within: float  # bytes that all workers have sent within hosts
    between: float  # and between them


@dataclass(frozen=True)
class MemoryFacts:
    """The bytes that one worker held, by kind, and the most that its process had in memory.

    What couldn't be predicted is None.
    """

    predicted: dict[str, int | None]
    measured: dict[str, int]
    peak: int


@dataclass(frozen=True)
class SteadyTimes:
    """The times that last through a run: those seen in four of five tenths of it, first steps
    left out.
    """

    step: float  # seconds of a step, the median of the tenths
    least: dict[str, float]  # seconds that each part of a step took at least in four of five tenths

    def lasts(self, part: str, share: float, seconds: float) -> bool:
        """Whether `part` takes more than this share of a step and at least so many seconds of
        it, nearly all the time.
        """
        return self.least[part] >= seconds and self.least[part] > share * self.step


class Standing(NamedTuple):
    """How a run stands: in one word, and in words that follow on its name."""

    # "ended", "failed", "running", "gone"; "open" if nothing tells whether it is running or gone
    state: str
    words: str


ENDED = Standing("ended", "has ended")
OPEN = Standing("open", "has not ended (no summary.json): it is still running, or was broken off")


@dataclass(frozen=True)
class RunFacts:
    """The facts in the files of a run; a run that has not ended lacks those that only the
    summary has.
    """

    name: str
    ended: bool
    steps: int
    samples: int
    final_loss: float | None
    step_seconds: dict[str, float]
    seconds: float | None = None  # of the whole run
    sync: str = ""
    workers: int = 1
    hosts: int = 1
    steady: SteadyTimes | None = None  # None where the steps are too few to tell
    work: tuple[OwnWork, ...] = ()  # of each rank
    # of each rank: seconds of a mean step by which it was late, by cause
    late: tuple[dict[str, float], ...] = ()
    links: tuple[LinkFacts, ...] = ()  # that became slow
    untold: tuple[str, ...] = ()  # causes that could not be told on some worker
    dealing: DealingFacts | None = None  # None where it isn't known
    bytes_sent: dict[str, float] | None = None
    mesh: Mesh | None = None  # if a model was cut
    axes: tuple[AxisFacts, ...] = ()
    memory: tuple[MemoryFacts, ...] = ()  # of each rank
    pipelines: tuple[PipelineProfile, ...] = ()
    codecs: list[str] = field(default_factory=list)  # whether each paid, in words
    events: list[dict[str, Any]] = field(default_factory=list)
    saves: int = 0  # checkpoints on the disk
    best: tuple[str, float] | None = None  # the name of the best of them, and its metric
    stall: float = 0.0  # seconds for which training stood still for each of them
    write: float = 0.0  # seconds that each took until it was on the disk
    background: bool = False  # whether all were asked for in the background
    servers: list[serving.ServerFacts] = field(default_factory=list)
    standing: Standing = ENDED

    @property
    def step(self) -> float:
        """Seconds of a mean step."""
        return sum(self.step_seconds.values())

    def rank(self, rank: int) -> str:
        """Name a worker, with its place in the mesh."""
        return f"rank {rank}" if self.mesh is None else f"rank {rank} ({self.mesh.place(rank)})"

    def ranks(self, ranks: Sequence[int]) -> str:
        """Name several workers, with what their places in the mesh have in common."""
        if len(ranks) == 1:
            return self.rank(ranks[0])
        named = (
            f"ranks {', '.join(map(str, ranks))}" if len(ranks) < self.workers else "all workers"
        )
        places = [] if self.mesh is None else [self.mesh.coordinates(rank) for rank in ranks]
        common = [
            f"{axis} {at}"
            for axis, at in (places[0] if places else {}).items()
            if all(place[axis] == at for place in places)
        ]
        return f"{named} ({', '.join(common)})" if common and named != "all workers" else named

    def share(self, part: str) -> float:
        """Return the share of a step that `part` takes."""
        return self.step_seconds[part] / self.step if self.step > 0 else 0.0


def read(folder: RunFolder, metrics: MetricsReader | None = None) -> RunFacts:
    """Read the facts of a run: from its summary, or, if it has none yet, from its metrics.

    `metrics`: a reader of the run's metrics, which goes on where it was.
    """
    metrics = metrics or MetricsReader(folder)
    if folder.summary.is_file():
        return _from_summary(folder, metrics)
    if folder.metrics.is_file():
        return _from_metrics(folder, metrics)
    if folder.path.is_file():
        raise UsageError(
            f"{folder.path} is a file: give the folder of a run, such as runs/NAME, or nothing for "
            "the newest in runs"
        )
    if not folder.path.is_dir():
        runs = sorted(path.parent.name for path in folder.path.parent.glob("*/metrics.jsonl"))
        near = (
            f"runs in {folder.path.parent}: {', '.join(runs[-8:])}"
            if runs
            else f"{folder.path.parent} holds no runs"
        )
        raise UsageError(f"there is no run folder {folder.path}; {near}")
    if not any(folder.path.iterdir()):
        return RunFacts(folder.name, False, 0, 0, None, dict.fromkeys(PARTS, 0.0), standing=OPEN)
    runs = sorted(path.parent.name for path in folder.path.glob("*/metrics.jsonl"))
    inside = f"; it holds the runs {', '.join(runs[-8:])}: name one of them" if runs else ""
    raise UsageError(
        f"{folder.path} is no run folder: it has neither {folder.summary.name} nor "
        f"{folder.metrics.name}{inside}"
    )


def read_fields(path: Path) -> dict[str, Any]:
    """Read a summary, or what a run under way tells.

    Raises OSError, and ValueError for what no run of ours has written.
    """
    with path.open("rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST >> 20} MiB")
    try:
        found = json.loads(text, parse_float=_finite, parse_int=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    for name, most in MOST.items():
        value = found.get(name, [])
        if (len(value) if isinstance(value, list) else int(value)) > most:
            raise ValueError(f"its {name} are more than {most:,}")
    for each in (*found.get("events", ()), *found.get("saves", ())):
        _real(each["time"])
    return found


def _finite(text: str) -> float:
    """Read a number that a run may have measured; `strict_json` writes infinities, and what is
    no number, as texts.
    """
    value = int(text) if text.lstrip("-").isdigit() and len(text) < 20 else float(text)
    if not abs(value) < 1e100:
        raise ValueError(f"{text[:40]} is no number that a run measures")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{repr(value)[:40]} is no number of seconds")
    return float(value)


def so_far(folder: RunFolder) -> dict[str, Any]:
    """Read the fields of a summary that a run under way tells; none where it doesn't, or is of
    another version.
    """
    try:
        found = read_fields(folder.live)
    except (OSError, ValueError, TypeError, LookupError):
        return {}
    return found if "sync" in found else {}


def standing(told: Mapping[str, Any]) -> Standing:
    """Say how a run without a summary stands. `told`: what it tells of itself (`so_far`)."""
    try:
        live = told["live"]
        step, there = f"at step {int(live['step'])}", alive(live["writer"])
        if live["state"] == "failed":
            return Standing("failed", f"failed {step}: {live['why']}")
        if there is False and time.time() - float(live["time"]) >= GONE:
            return Standing(
                "gone", f"was broken off {step}: the process that wrote its folder is gone"
            )
        return OPEN if there is None else Standing("running", f"is running, {step}")
    except (KeyError, TypeError, ValueError, AttributeError):
        return OPEN


def timed_steps(folder: RunFolder) -> list[tuple[int, dict[str, float]]]:
    """Return the samples of each step in the metrics of a run, and the seconds of its parts."""
    metrics = MetricsReader(folder)
    metrics.read()
    steps = metrics.steps
    rows = zip(steps.samples.tolist(), steps.seconds.tolist(), strict=True)
    return [(int(samples), dict(zip(PARTS, seconds, strict=True))) for samples, seconds in rows]


def steadied(seconds: Floats) -> SteadyTimes | None:
    """Find the times that last through these steps, each a row with the seconds of PARTS; None
    where they are too few.
    """
    if len(seconds) < FEWEST:
        return None
    warmed = seconds[WARM:]
    tenths = [
        warmed[n * len(warmed) // TENTHS : (n + 1) * len(warmed) // TENTHS] for n in range(TENTHS)
    ]
    means = np.array([tenth.mean(axis=0) for tenth in tenths])
    least = np.sort(means, axis=0)[TENTHS // 5]
    return SteadyTimes(
        float(np.median(means.sum(axis=1))), dict(zip(PARTS, least.tolist(), strict=True))
    )


def _from_summary(folder: RunFolder, metrics: MetricsReader) -> RunFacts:
    try:
        fields = read_fields(folder.summary)
        saved = fields.get("checkpoints") or {
            "count": 0,
            "stall_seconds": 0.0,
            "write_seconds": 0.0,
        }
        each = max(int(saved["count"]), 1)
        dealt = fields.get("loader")
        facts = RunFacts(
            name=folder.name,
            ended=True,
            steps=int(fields["steps"]),
            samples=int(fields["samples"]),
            final_loss=_number(fields["final_loss"]),
            step_seconds={part: float(fields["step_seconds"][part]) for part in PARTS},
            seconds=_real(fields["seconds"]),
            sync=str(fields["sync"]),
            workers=int(fields["workers"]),
            hosts=int(fields["hosts"]),
            work=tuple(
                OwnWork(float(rank["seconds"]), float(rank["late"]))
                for rank in fields.get("rank_work", [])
            ),
            late=_late(fields),
            links=tuple(map(_link, fields.get("links", []))),
            untold=tuple(cause for cause in fields.get("untold", []) if cause in CAUSES),
            dealing=DealingFacts(int(dealt["num_workers"]), tuple(map(int, dealt["shares"])))
            if dealt
            else None,
            bytes_sent={
                where: float(fields["bytes_sent"][where]) for where in ("within", "between")
            },
            mesh=_mesh(fields),
            axes=tuple(
                AxisFacts(axis, *(float(one[key]) for key in _AXIS))
                for axis, one in fields.get("axes", {}).items()
            ),
            memory=tuple(map(_memory, fields.get("memory", []))),
            pipelines=tuple(map(PipelineProfile.read, fields.get("pipelines", []))),
            codecs=[str(codec["words"]) for codec in fields.get("codecs", [])],
            events=[
                {"time": _real(event["time"]), "what": str(event["what"])}
                for event in fields["events"]
            ],
            saves=int(saved["count"]),
            best=(str(saved["best"]["checkpoint"]), float(saved["best"]["metric"]))
            if "best" in saved
            else None,
            stall=float(saved["stall_seconds"]) / each,
            write=float(saved["write_seconds"]) / each,
            background=int(saved.get("background", 0)) >= each,
            servers=[
                serving.read(server, index)
                for index, server in enumerate(fields.get("servers", []))
            ],
        )
    except KeyError as error:
        raise UsageError(
            f"{folder.summary} lacks {error}: it is not a summary of this version of paceline"
        ) from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
        raise UsageError(
            f"{folder.summary} is damaged ({error}); remove it, and the report is made of "
            f"{folder.metrics.name}"
        ) from error
    if not folder.metrics.is_file():
        return facts
    metrics.read()
    return replace(facts, steady=steadied(metrics.steps.seconds))


def _late(fields: Mapping[str, Any]) -> tuple[dict[str, float], ...]:
    """Return how late each rank was, without those who have left."""
    late = [
        {str(cause): float(value) for cause, value in each.items()}
        for each in fields.get("rank_late", [])
    ]
    members = fields.get("members", [])
    if len(members) != len(late):
        return tuple(late)
    ranks = [None if member["rank"] is None else int(member["rank"]) for member in members]
    there = sorted((rank, at) for at, rank in enumerate(ranks) if rank is not None)
    return tuple(late[at] for _, at in there)


def _memory(fields: Mapping[str, Any]) -> MemoryFacts:
    predicted = {
        kind: None if fields["predicted"][kind] is None else int(fields["predicted"][kind])
        for kind in KINDS
    }
    return MemoryFacts(
        predicted, {kind: int(fields["measured"][kind]) for kind in KINDS}, int(fields["peak"])
    )


def _link(fields: Mapping[str, Any]) -> LinkFacts:
    return LinkFacts(
        step=int(fields["step"]),
        words=str(fields["words"]),
        advice=str(fields["advice"]),
        hosts=tuple(map(str, fields["hosts"])),
        rate=float(fields["rate"]),
        usual=_number(fields["usual"]),
        gain=_number(fields["gain"]),
    )


def _mesh(fields: Mapping[str, Any]) -> Mesh | None:
    """Put the mesh together from the sizes of its axes and the places of ranks."""
    sizes, places = fields.get("mesh"), fields.get("places")
    if not sizes or not places:
        return None
    if len(places) != math.prod(map(int, sizes.values())) or len(places) != int(fields["workers"]):
        raise ValueError("its mesh is not that of its workers")
    by_place = sorted(
        range(len(places)), key=lambda rank: [int(places[rank][axis]) for axis in sizes]
    )
    return Mesh(tuple((str(axis), int(size)) for axis, size in sizes.items()), tuple(by_place))


def _from_metrics(folder: RunFolder, metrics: MetricsReader) -> RunFacts:
    metrics.read()
    steps, losses = metrics.steps, metrics.values.get("loss")
    spent = steps.seconds.mean(axis=0).tolist() if len(steps.seconds) else [0.0] * len(PARTS)
    told = so_far(folder)
    return RunFacts(
        name=folder.name,
        ended=False,
        steps=len(steps.step),
        samples=int(steps.samples.sum()),
        final_loss=None if losses is None else float(losses.value[-1]),
        step_seconds=dict(zip(PARTS, spent, strict=True)),
        seconds=metrics.seconds,
        steady=steadied(steps.seconds),
        sync=str(told.get("sync", "")),
        workers=int(told.get("workers", 1)),
        hosts=int(told.get("hosts", 1)),
        mesh=_mesh(told),
        standing=standing(told),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
