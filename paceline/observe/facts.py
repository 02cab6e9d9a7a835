"""The facts of a run, read from its files: the summary, and the metrics step by step."""

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
from paceline.observe import server_report
from paceline.observe.goodput_report import GoodputFacts, read_goodput
from paceline.observe.metrics_reader import Floats, MetricsReader
from paceline.record.folder import MEMORY_KINDS, RunFolder
from paceline.record.live import GONE_SECONDS, is_writer_alive
from paceline.record.pipeline_profile import PipelineProfile
from paceline.trace import STEP_PARTS
from paceline.unequal.stragglers.causes import CAUSES

WARM_UP_STEPS = 5  # first steps that are left out
STRETCHES = 10  # stretches of a run that are compared
MIN_STEPS = 25  # with fewer steps nothing is certain

# Limits of a summary. It may come from someone else, and must not exhaust the memory of a reader.
MAX_SUMMARY_NBYTES = 64 << 20  # bytes
MAX_COUNTS = {"workers": 1 << 14, "hosts": 1 << 14, "events": 100_000, "saves": 100_000}
_AXIS_FIELDS = ("seconds", "within", "between")


@dataclass(frozen=True)
class DealingFacts:
    """How the training loader was dealt to the workers."""

    num_workers: int = 0  # processes that read ahead, for each worker
    # Of a usual batch; empty if there is no usual one.
    shares: tuple[int, ...] = ()


@dataclass(frozen=True)
class OwnWork:
    """The own work of a worker, without exchange and waiting."""

    seconds: float  # in a step, the median
    # Share of the steps in which it was a tenth above the usual work among the workers.
    late: float


@dataclass(frozen=True)
class LinkFacts:
    """A link between hosts that became slow."""

    step: int  # at which that was noticed
    words: str
    advice: str  # empty if nothing is known that would help
    # One host if all of its links are slow, or the two hosts of a single link.
    hosts: tuple[str, ...]
    rate: float  # bytes per second
    # Bytes per second of other links, if there are others.
    usual: float | None
    # Speed-up of steps if the advice is followed.
    gain: float | None


@dataclass(frozen=True)
class AxisFacts:
    """The exchanges of a step along one axis of the mesh."""

    axis: str
    seconds: float  # that a worker stood still, the mean
    within: float  # bytes sent within hosts by all workers
    between: float  # bytes sent between hosts by all workers


@dataclass(frozen=True)
class MemoryFacts:
    """The bytes that one worker held by kind, and the peak of its process.

    A prediction that could not be made is None.
    """

    predicted: dict[str, int | None]
    measured: dict[str, int]
    peak: int


@dataclass(frozen=True)
class SteadyTimes:
    """Times that last through a run: seen in four of five tenths of it, without the first steps."""

    # Seconds of a step, the median of the tenths.
    step: float
    # Least seconds of each part of a step in four of five tenths.
    least: dict[str, float]

    def is_lasting(self, part: str, share: float, seconds: float) -> bool:
        """Whether a part of a step is large nearly all the time.

        Args:
            part: Part of a step, one of PARTS.
            share: Share of a step that it has to exceed.
            seconds: Seconds of a step that it has to reach.
        """
        return self.least[part] >= seconds and self.least[part] > share * self.step


class RunStanding(NamedTuple):
    """The state of a run: in one word, and in words that follow its name."""

    # "ended", "failed", "running" or "gone"; "open" if it may be running or gone.
    state: str
    words: str


ENDED_STANDING = RunStanding("ended", "has ended")
OPEN_STANDING = RunStanding(
    "open", "has not ended (no summary.json): it is still running, or was broken off"
)


@dataclass(frozen=True)
class RunFacts:
    """The facts in the files of a run.

    If a run has not ended, the facts that only the summary has are missing.
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
    steady: SteadyTimes | None = None  # None if there are too few steps
    work: tuple[OwnWork, ...] = ()  # of each rank
    # Of each rank: seconds of a mean step by which it was late, by cause.
    late: tuple[dict[str, float], ...] = ()
    links: tuple[LinkFacts, ...] = ()  # that became slow
    # Causes that some worker could not tell apart.
    untold: tuple[str, ...] = ()
    dealing: DealingFacts | None = None  # None if it isn't known
    bytes_sent: dict[str, float] | None = None
    mesh: Mesh | None = None  # if a model was cut
    axes: tuple[AxisFacts, ...] = ()
    memory: tuple[MemoryFacts, ...] = ()  # of each rank
    pipelines: tuple[PipelineProfile, ...] = ()
    codecs: list[str] = field(default_factory=list)  # whether each paid, in words
    events: list[dict[str, Any]] = field(default_factory=list)
    saves: int = 0  # checkpoints on the disk
    best: tuple[str, float] | None = None  # name and metric of the best checkpoint
    # Seconds that training stood still for each checkpoint.
    stall: float = 0.0
    # Seconds until each checkpoint was on the disk.
    write: float = 0.0
    background: bool = False  # whether all were saved in the background
    servers: list[server_report.ServerFacts] = field(default_factory=list)
    # The steps compared with the plan that the run followed, in words. Empty: it followed none.
    planned: str = ""
    goodput: GoodputFacts | None = None  # None if it isn't known
    standing: RunStanding = ENDED_STANDING

    @property
    def mean_step_seconds(self) -> float:
        """Seconds of a mean step."""
        return sum(self.step_seconds.values())

    def name_rank(self, rank: int) -> str:
        """Name a worker, with its place in the mesh."""
        return (
            f"rank {rank}"
            if self.mesh is None
            else f"rank {rank} ({self.mesh.format_coordinates(rank)})"
        )

    def name_ranks(self, ranks: Sequence[int]) -> str:
        """Name several workers, with the coordinates that they share in the mesh."""
        if len(ranks) == 1:
            return self.name_rank(ranks[0])
        names = (
            f"ranks {', '.join(map(str, ranks))}" if len(ranks) < self.workers else "all workers"
        )
        places = [] if self.mesh is None else [self.mesh.coordinates(rank) for rank in ranks]
        common = [
            f"{axis} {at}"
            for axis, at in (places[0] if places else {}).items()
            if all(place[axis] == at for place in places)
        ]
        return f"{names} ({', '.join(common)})" if common and names != "all workers" else names

    def share_of_step(self, part: str) -> float:
        """Return the share of a step that `part` takes."""
        return (
            self.step_seconds[part] / self.mean_step_seconds if self.mean_step_seconds > 0 else 0.0
        )


def read_facts(folder: RunFolder, metrics: MetricsReader | None = None) -> RunFacts:
    """Read the facts of a run: from its summary, or from its metrics if it has no summary yet.

    Args:
        folder: Folder of the run.
        metrics: Reader of the run's metrics, which continues where it was. Default: a new one.

    Raises:
        UsageError: The folder isn't that of a run, or a file in it is damaged.
    """
    metrics = metrics or MetricsReader(folder)
    if folder.summary.is_file():
        return _facts_from_summary(folder, metrics)
    if folder.metrics.is_file():
        return _facts_from_metrics(folder, metrics)
    # There is nothing to read. The rest finds out what the user may have meant.
    if folder.path.is_file():
        raise UsageError(
            f"{folder.path} is a file: give the folder of a run, such as runs/NAME, or nothing for "
            "the newest in runs"
        )
    if not folder.path.is_dir():
        runs = sorted(path.parent.name for path in folder.path.parent.glob("*/metrics.jsonl"))
        known_runs = (
            f"runs in {folder.path.parent}: {', '.join(runs[-8:])}"
            if runs
            else f"{folder.path.parent} holds no runs"
        )
        raise UsageError(f"there is no run folder {folder.path}; {known_runs}")
    if not any(folder.path.iterdir()):
        return RunFacts(
            folder.name, False, 0, 0, None, dict.fromkeys(STEP_PARTS, 0.0), standing=OPEN_STANDING
        )
    runs = sorted(path.parent.name for path in folder.path.glob("*/metrics.jsonl"))
    contained_runs = f"; it holds the runs {', '.join(runs[-8:])}: name one of them" if runs else ""
    raise UsageError(
        f"{folder.path} is not a run folder: it has neither {folder.summary.name} nor "
        f"{folder.metrics.name}{contained_runs}"
    )


def read_fields(path: Path) -> dict[str, Any]:
    """Read a summary, or the live file of a run that is under way.

    The file is not trusted: sizes, nesting and numbers are checked.

    Raises:
        OSError: The file can't be read.
        ValueError, TypeError, KeyError: No run of ours has written the file.
    """
    with path.open("rb") as file:
        text = file.read(MAX_SUMMARY_NBYTES + 1)
    if len(text) > MAX_SUMMARY_NBYTES:
        raise ValueError(f"it has more than {MAX_SUMMARY_NBYTES >> 20} MiB")
    try:
        fields = json.loads(
            text, parse_float=_parse_finite, parse_int=_parse_finite, parse_constant=_parse_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    for name, limit in MAX_COUNTS.items():
        value = fields.get(name, [])
        if (len(value) if isinstance(value, list) else int(value)) > limit:
            raise ValueError(f"its {name} are more than {limit:,}")
    for event in (*fields.get("events", ()), *fields.get("saves", ())):
        _check_seconds(event["time"])
    return fields


def _parse_finite(text: str) -> float:
    """Parse a number that a run may have measured.

    Infinities and NaN are not numbers here, because `to_strict_json` writes them as strings.
    """
    value = int(text) if text.lstrip("-").isdigit() and len(text) < 20 else float(text)
    if not abs(value) < 1e100:
        raise ValueError(f"{text[:40]} is not a number that a run can measure")
    return value


def _check_seconds(value: Any) -> float:
    """Return a number of seconds. Raises `TypeError` for anything else."""
    if type(value) not in (int, float):
        raise TypeError(f"{repr(value)[:40]} is not a number of seconds")
    return float(value)


def read_live_fields(folder: RunFolder) -> dict[str, Any]:
    """Read the fields of a summary that a run has published while it is under way.

    Without a live file, or if it is of another version, there are none.
    """
    try:
        fields = read_fields(folder.live)
    except (OSError, ValueError, TypeError, LookupError):
        return {}
    return fields if "sync" in fields else {}


def describe_standing(told: Mapping[str, Any]) -> RunStanding:
    """Describe the state of a run without a summary. `told` are its live fields."""
    try:
        live = told["live"]
        step, is_alive = f"at step {int(live['step'])}", is_writer_alive(live["writer"])
        if live["state"] == "failed":
            return RunStanding("failed", f"failed {step}: {live['why']}")
        # A run whose writer has died may go on with another one. That would have written by now.
        if is_alive is False and time.time() - float(live["time"]) >= GONE_SECONDS:
            return RunStanding(
                "gone", f"was broken off {step}: the process that wrote its folder is gone"
            )
        return OPEN_STANDING if is_alive is None else RunStanding("running", f"is running, {step}")
    except (KeyError, TypeError, ValueError, AttributeError):
        return OPEN_STANDING


def read_timed_steps(folder: RunFolder) -> list[tuple[int, dict[str, float]]]:
    """Return the samples of each step of a run, and the seconds of its parts."""
    metrics = MetricsReader(folder)
    metrics.read_new_lines()
    steps = metrics.steps
    rows = zip(steps.samples.tolist(), steps.seconds.tolist(), strict=True)
    return [
        (int(samples), dict(zip(STEP_PARTS, seconds, strict=True))) for samples, seconds in rows
    ]


def find_steady_times(seconds: Floats) -> SteadyTimes | None:
    """Find the times that last through these steps; None if there are too few.

    `seconds` has a row for each step, and a column for each of PARTS.
    """
    if len(seconds) < MIN_STEPS:
        return None
    warmed = seconds[WARM_UP_STEPS:]
    tenths = [
        warmed[
            tenth_index * len(warmed) // STRETCHES : (tenth_index + 1) * len(warmed) // STRETCHES
        ]
        for tenth_index in range(STRETCHES)
    ]
    means = np.array([tenth.mean(axis=0) for tenth in tenths])
    # A fifth of the tenths may be lower.
    least = np.sort(means, axis=0)[STRETCHES // 5]
    return SteadyTimes(
        float(np.median(means.sum(axis=1))), dict(zip(STEP_PARTS, least.tolist(), strict=True))
    )


def _facts_from_summary(folder: RunFolder, metrics: MetricsReader) -> RunFacts:
    """Read the facts from the summary, and the steady times from the metrics."""
    try:
        fields = read_fields(folder.summary)
        facts = _parse_summary(folder.name, fields)
    except KeyError as error:
        raise UsageError(
            f"{folder.summary} lacks {error}: it is not a summary of this version of paceline"
        ) from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
        raise UsageError(
            f"{folder.summary} is damaged ({error}); remove it, and the report is made from "
            f"{folder.metrics.name}"
        ) from error
    if not folder.metrics.is_file():
        return facts
    metrics.read_new_lines()
    return replace(facts, steady=find_steady_times(metrics.steps.seconds))


def _parse_summary(name: str, fields: Mapping[str, Any]) -> RunFacts:
    """Parse the fields of the summary of a run. Fields that came later may be missing."""
    loader = fields.get("loader")
    return RunFacts(
        name=name,
        ended=True,
        steps=int(fields["steps"]),
        samples=int(fields["samples"]),
        final_loss=_optional_float(fields["final_loss"]),
        step_seconds={part: float(fields["step_seconds"][part]) for part in STEP_PARTS},
        seconds=_check_seconds(fields["seconds"]),
        sync=str(fields["sync"]),
        workers=int(fields["workers"]),
        hosts=int(fields["hosts"]),
        work=tuple(
            OwnWork(float(rank["seconds"]), float(rank["late"]))
            for rank in fields.get("rank_work", [])
        ),
        late=_read_lateness(fields),
        links=tuple(map(_read_link, fields.get("links", []))),
        untold=tuple(cause for cause in fields.get("untold", []) if cause in CAUSES),
        dealing=DealingFacts(int(loader["num_workers"]), tuple(map(int, loader["shares"])))
        if loader
        else None,
        bytes_sent={where: float(fields["bytes_sent"][where]) for where in ("within", "between")},
        mesh=_read_mesh(fields),
        axes=tuple(
            AxisFacts(axis, *(float(one[key]) for key in _AXIS_FIELDS))
            for axis, one in fields.get("axes", {}).items()
        ),
        memory=tuple(map(_read_memory, fields.get("memory", []))),
        pipelines=tuple(map(PipelineProfile.from_fields, fields.get("pipelines", []))),
        codecs=[str(codec["words"]) for codec in fields.get("codecs", [])],
        events=[
            {"time": _check_seconds(event["time"]), "what": str(event["what"])}
            for event in fields["events"]
        ],
        **_read_checkpoints(fields),
        servers=[
            server_report.read_server(server, index)
            for index, server in enumerate(fields.get("servers", []))
        ],
        planned=_describe_planned(fields),
        goodput=read_goodput(fields.get("goodput")),
    )


def _read_checkpoints(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the facts about checkpoints: how many, the best of them, and their mean seconds."""
    saved = fields.get("checkpoints") or {"count": 0, "stall_seconds": 0.0, "write_seconds": 0.0}
    count = max(int(saved["count"]), 1)
    best: Any = saved.get("best")
    return {
        "saves": int(saved["count"]),
        "best": (str(best["checkpoint"]), float(best["metric"])) if "best" in saved else None,
        "stall": float(saved["stall_seconds"]) / count,
        "write": float(saved["write_seconds"]) / count,
        "background": int(saved.get("background", 0)) >= count,
    }


def _describe_planned(fields: Mapping[str, Any]) -> str:
    """Describe how the run compares with its plan; empty if it had none."""
    planned = fields.get("settings", {}).get("plan")
    if planned is None:
        return ""
    words = str(planned["words"])
    return f"{words[:1].upper()}{words[1:]}."


def _read_lateness(fields: Mapping[str, Any]) -> tuple[dict[str, float], ...]:
    """Read the lateness of each rank, without workers that have left."""
    late_by_rank = [
        {str(cause): float(value) for cause, value in each.items()}
        for each in fields.get("rank_late", [])
    ]
    members = fields.get("members", [])
    # Without members, `rank_late` is in the order of ranks. Otherwise it is in the order of
    # members.
    if len(members) != len(late_by_rank):
        return tuple(late_by_rank)
    ranks = [None if member["rank"] is None else int(member["rank"]) for member in members]
    present = sorted((rank, at) for at, rank in enumerate(ranks) if rank is not None)
    return tuple(late_by_rank[at] for _, at in present)


def _read_memory(fields: Mapping[str, Any]) -> MemoryFacts:
    """Read the memory of one rank."""
    predicted = {
        kind: None if fields["predicted"][kind] is None else int(fields["predicted"][kind])
        for kind in MEMORY_KINDS
    }
    return MemoryFacts(
        predicted,
        {kind: int(fields["measured"][kind]) for kind in MEMORY_KINDS},
        int(fields["peak"]),
    )


def _read_link(fields: Mapping[str, Any]) -> LinkFacts:
    """Read a slow link."""
    return LinkFacts(
        step=int(fields["step"]),
        words=str(fields["words"]),
        advice=str(fields["advice"]),
        hosts=tuple(map(str, fields["hosts"])),
        rate=float(fields["rate"]),
        usual=_optional_float(fields["usual"]),
        gain=_optional_float(fields["gain"]),
    )


def _read_mesh(fields: Mapping[str, Any]) -> Mesh | None:
    """Build the mesh from the sizes of its axes and the places of the ranks; None without one."""
    sizes, places = fields.get("mesh"), fields.get("places")
    if not sizes or not places:
        return None
    if len(places) != math.prod(map(int, sizes.values())) or len(places) != int(fields["workers"]):
        raise ValueError("its mesh does not fit its workers")
    by_place = sorted(
        range(len(places)), key=lambda rank: [int(places[rank][axis]) for axis in sizes]
    )
    return Mesh(tuple((str(axis), int(size)) for axis, size in sizes.items()), tuple(by_place))


def _facts_from_metrics(folder: RunFolder, metrics: MetricsReader) -> RunFacts:
    """Read the facts from the metrics, and from the live file if there is one."""
    metrics.read_new_lines()
    steps, losses = metrics.steps, metrics.values.get("loss")
    mean_seconds = (
        steps.seconds.mean(axis=0).tolist() if len(steps.seconds) else [0.0] * len(STEP_PARTS)
    )
    live_fields = read_live_fields(folder)
    return RunFacts(
        name=folder.name,
        ended=False,
        steps=len(steps.step),
        samples=int(steps.samples.sum()),
        final_loss=None if losses is None else float(losses.value[-1]),
        step_seconds=dict(zip(STEP_PARTS, mean_seconds, strict=True)),
        seconds=metrics.last_seconds,
        steady=find_steady_times(steps.seconds),
        sync=str(live_fields.get("sync", "")),
        workers=int(live_fields.get("workers", 1)),
        hosts=int(live_fields.get("hosts", 1)),
        mesh=_read_mesh(live_fields),
        standing=describe_standing(live_fields),
    )


def _optional_float(value: Any) -> float | None:
    """Return a float, or None for None."""
    return None if value is None else float(value)
