"""Whether a codec pays: what it sends, costs and loses, compared with exact sums on the same links.

    buckets are full at   b0      b1     b2 |needed
    exact, on the link    [===b0===][===b1===][===b2===]
                                            |-exposed--|        what backward could not hide

The link is measured once, by exact sums of two sizes. How far the mean is off is seen on a sample,
which is summed exactly as well.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.codec.codec import Sum, Way
from paceline.comm.group_protocol import Group, Work

SMALL, LARGE = 4 << 10, 256 << 10  # elements of the sums that a link is measured with
QUICK = 5e-3  # seconds below which a sum tells little of the link, so that a larger one is taken
SAMPLE = 2048  # elements in a step that are summed exactly, for comparison
STRIDE = 7919  # how far the sample moves from step to step


class ExactRate(NamedTuple):
    """Time of an exact sum: `latency` in seconds, seconds `per_byte` of the tensor, and bytes
    `sent` by a rank for each of those.
    """

    latency: float
    per_byte: float
    sent: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds that a sum of a tensor of so many bytes takes."""
        return self.latency + self.per_byte * nbytes

    @property
    def link(self) -> float:
        """Bytes a second that a rank sends."""
        return self.sent / self.per_byte if self.per_byte > 0 else math.inf


def measure(
    group: Group, device: torch.device, send: Callable[[Tensor], Work[Any]] | None = None
) -> ExactRate:
    """Measure how fast exact sums are in this group (or those that `send` starts); the figures are
    the same on every rank.

    Collective; takes some tenths of a second on slow links.
    """

    def seconds(numel: int) -> float:
        """Return the slowest rank's, of the better of two tries."""
        x, tries = torch.zeros(numel, dtype=torch.float32, device=device), []
        for _ in range(2):
            group.barrier().wait()
            began = time.perf_counter()
            (group.all_reduce(x, out=x) if send is None else send(x)).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            tries.append(time.perf_counter() - began)
        slowest = group.all_reduce(
            torch.tensor([min(tries)], dtype=torch.float64, device=device), op="max"
        ).wait()
        return float(slowest[0])

    small, numel, before = seconds(SMALL), LARGE, sent_by(group)
    large = seconds(numel)
    while (large < QUICK or large <= small) and numel < 16 * LARGE:
        numel, before = numel * 4, sent_by(group)
        large = seconds(numel)
    mine = (sent_by(group) - before) / 2
    per_byte = max(large - small, 0.0) / (4 * (numel - SMALL))
    return ExactRate(max(small - per_byte * 4 * SMALL, 0.0), per_byte, mine / (4 * numel))


def sent_by(*groups: Group) -> int:
    """Number of bytes that this worker has sent in these groups."""
    return sum(group.traffic.within + group.traffic.between for group in groups)


class ExchangeCost(NamedTuple):
    """Seconds that the exchange of a bucket takes: on this processor before and after, and on
    the link between.
    """

    before: float
    link: float
    after: float


def exposed(ready: Sequence[float], costs: Sequence[ExchangeCost], needed: float) -> float:
    """Seconds after `needed` until the last of these buckets arrives.

    One is coded while another is on the link.
    """
    coded = gone = there = needed
    if ready:
        coded = gone = there = -math.inf
    for step_state, cost in sorted(zip(ready, costs, strict=True), key=lambda pair: pair[0]):
        coded = max(coded, step_state) + cost.before
        gone = max(gone, coded) + cost.link
        there = max(there, gone) + cost.after
    return max(0.0, there - needed)


@dataclass
class BucketTrip:
    """One bucket on its way through its codec, as its leader saw it."""

    index: int
    numel: int
    # seconds of this processor, before each wait and after the last
    coding: list[float] = field(default_factory=list)
    given: Tensor | None = None  # a sample of what went in
    total: Tensor | None = None  # the same elements of what came out


def timed(going: Way, trip: BucketTrip) -> Way:
    """Run `going`, and count its time on this processor.

    On a GPU work is only begun here, so there that isn't much.
    """
    result: Any = None
    while True:
        began = time.thread_time()
        try:
            work = going.send(result)
        except StopIteration as stop:
            trip.coding.append(time.thread_time() - began)
            found: Sum = stop.value
            return found
        trip.coding.append(time.thread_time() - began)
        result = yield work


@dataclass
class CodecTurn:
    """Figures of one step, or one round."""

    sent: float  # bytes
    exact: float  # bytes that exact sums would have sent
    coding: float  # seconds of this processor, there and back
    shown: float  # seconds of the exchange that were waited for
    exact_shown: float  # the same, as exact sums would have it


class CodecAccount:
    """What one strategy's codec has done, turn by turn, on a leader; other workers have an empty
    account.
    """

    def __init__(self, codec: str, compared: str = "the mean") -> None:
        self.codec, self.compared = codec, compared
        self.rate: ExactRate | None = None
        self.turns: list[CodecTurn] = []
        self.errors: list[float] = []  # of each turn whose sample was finite
        self._fresh: list[tuple[str, float]] = []
        self._sample: tuple[Work[Tensor], Tensor] | None = None

    def add(self, turn: CodecTurn) -> None:
        """Add the figures of a turn that is over."""
        self.turns.append(turn)
        self._fresh += [("codec_bytes", turn.sent), ("codec_seconds", turn.coding)]

    def compare(self, work: Work[Tensor], total: Tensor) -> None:
        """Compare, later, the sample of this turn: `work` sums it exactly, `total` is what came
        through the codec.
        """
        self._sample = work, total

    def forget(self) -> None:
        """Drop the sample, as its group has been closed."""
        self._sample = None

    def settle(self) -> None:
        """Read the sample of the turn before."""
        if self._sample is None:
            return
        (work, total), self._sample = self._sample, None
        error = off(total, work.wait())
        if math.isfinite(error):
            self.errors.append(error)
            self._fresh.append(("codec_error", error))

    def take(self) -> dict[str, float]:
        """News since the last call, for the log."""
        found, self._fresh = dict(self._fresh), []
        return found

    def facts(self) -> dict[str, Any] | None:
        """Return means over turns, as plain numbers; None where nothing went through the codec
        here.
        """
        if not self.turns or self.rate is None:
            return None
        means = {
            name: statistics.fmean(getattr(turn, name) for turn in self.turns)
            for name in CodecTurn.__dataclass_fields__
        }
        return {
            "codec": self.codec,
            "compared": self.compared,
            "turns": len(self.turns),
            **means,
            "error": statistics.fmean(self.errors) if self.errors else math.nan,
            "link": self.rate.link,
        }


def off(found: Tensor, right: Tensor) -> float:
    """Return |found - right| / |right|, or nan if that isn't finite."""
    size = float(right.double().norm())
    return float((found.double() - right.double()).norm()) / size if size > 0 else math.nan


def sampled(x: Tensor, every: int, step: int) -> Tensor:
    """Return a sample of a flat tensor, of other elements in every step."""
    return x[step * STRIDE % every :: every].clone()


@dataclass(frozen=True)
class CodecVerdict:
    """What all leaders found together, as the summary shows it.

    Bytes and seconds are of one turn: a step, or a round.
    """

    codec: str
    turns: int  # in which something was sent
    bytes_sent: float  # by all leaders
    bytes_exact: float  # that exact sums would have sent
    coding_seconds: float  # of a processor, mean over leaders
    shown_seconds: float  # of the exchange that was waited for, mean over leaders
    exact_shown_seconds: float  # the same with exact sums, as predicted
    compared: str  # whose relative error it is: "the mean", or what neighbours know of each other
    # |what arrived - what is right| / |what is right|, mean over turns, on a sample
    relative_error: float
    link_bytes_per_second: float  # that a leader sends
    step_seconds: float  # of a step, all its parts
    gain: float  # predicted seconds of a step with exact sums / seconds of a step now
    words: str = ""


def judge(facts: Iterable[dict[str, Any] | None], step: float, steps: int) -> CodecVerdict | None:
    """Judge a codec by the facts of all workers; None if none has any.

    `step`: seconds of a step, `steps`: how many there were.
    """
    found = [each for each in facts if each is not None]
    if not found:
        return None

    def mean(name: str) -> float:
        return statistics.fmean(each[name] for each in found)

    turns, shown, exact = found[0]["turns"], mean("shown"), mean("exact_shown")
    saved = (exact - shown) * turns / max(steps, 1)  # in a step
    verdict = CodecVerdict(
        codec=found[0]["codec"],
        turns=turns,
        bytes_sent=sum(each["sent"] for each in found),
        bytes_exact=sum(each["exact"] for each in found),
        coding_seconds=mean("coding"),
        shown_seconds=shown,
        exact_shown_seconds=exact,
        compared=found[0]["compared"],
        relative_error=mean("error"),
        link_bytes_per_second=mean("link"),
        step_seconds=step,
        gain=max(step + saved, 1e-9) / step if step > 0 else 1.0,
    )
    return replace(verdict, words=_words(verdict, steps))


def _words(verdict: CodecVerdict, steps: int) -> str:
    turn = "step" if verdict.turns * 1.1 > steps else "round"
    off_by = (
        f", and {verdict.compared} was {verdict.relative_error:.2g} of its size off"
        if math.isfinite(verdict.relative_error)
        else ""
    )
    text = (
        f"{verdict.codec} sent {_megabytes(verdict.bytes_sent)} a {turn} "
        "where exact sums would have sent "
        f"{_megabytes(verdict.bytes_exact)}; coding took {_seconds(verdict.coding_seconds)} of a "
        f"processor{off_by}. On this link "
        f"({verdict.link_bytes_per_second * 8e-6:,.0f} Mbit/s out of each) "
        f"{_seconds(verdict.shown_seconds)} of the exchange showed, with "
        f"exact sums it would be about {_seconds(verdict.exact_shown_seconds)}: "
    )
    if verdict.gain >= 1.02:
        return text + f"it paid, steps are about {verdict.gain:.2f} times as fast."
    if verdict.gain <= 0.98:
        return text + (
            f"it did not pay, exact sums would be about {1 / verdict.gain:.2f} times as fast. "
            "Leave the codec out here."
        )
    return text + "it made no difference to the time. Exact sums would lose nothing."


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
