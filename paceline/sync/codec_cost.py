"""Accounts for a codec: bytes, seconds and error, compared with exact sums on the same links.

    buckets are full at   b0      b1     b2 |needed
    exact, on the link    [===b0===][===b1===][===b2===]
                                            |-exposed--|        the part that backward doesn't hide

The link is measured once, by exact sums of two sizes. The error is measured on a sample of the
elements, which is also summed exactly.
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

SMALL_NUMEL, LARGE_NUMEL = 4 << 10, 256 << 10  # elements of the two sums that measure a link
SHORTEST_TIME = 5e-3  # seconds; a faster sum says little about the link, so a larger one is tried
SAMPLE_NUMEL = 2048  # elements per step that are also summed exactly
SAMPLE_STEP = 7919  # elements that the sample moves by from step to step


class ExactRate(NamedTuple):
    """Time of an exact sum as a linear function of the tensor's size."""

    latency: float  # seconds
    per_byte: float  # seconds per byte of the tensor
    sent: float  # bytes that a rank sends per byte of the tensor

    def predict_seconds(self, nbytes: float) -> float:
        """Seconds that the sum of a tensor of `nbytes` takes."""
        return self.latency + self.per_byte * nbytes

    @property
    def link_bytes_per_second(self) -> float:
        """Bytes per second that a rank sends."""
        return self.sent / self.per_byte if self.per_byte > 0 else math.inf


def measure_exact_rate(
    group: Group, device: torch.device, send: Callable[[Tensor], Work[Any]] | None = None
) -> ExactRate:
    """Measure how fast exact sums are in this group. Collective.

    All ranks get the same figures. It takes some tenths of a second on slow links.

    Args:
        group: Workers that sum.
        device: Device of the tensors.
        send: Starts the sum, or another exchange, of a tensor. Default: the group's all-reduce.
    """

    def time_sum(numel: int) -> float:
        """Seconds of a sum on the slowest rank, each rank counting the better of two tries."""
        flat, tries = torch.zeros(numel, dtype=torch.float32, device=device), []
        for _ in range(2):
            group.barrier().wait()
            started = time.perf_counter()
            (group.all_reduce(flat, out=flat) if send is None else send(flat)).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            tries.append(time.perf_counter() - started)
        slowest = group.all_reduce(
            torch.tensor([min(tries)], dtype=torch.float64, device=device), op="max"
        ).wait()
        return float(slowest[0])

    small_seconds, numel, sent_before = time_sum(SMALL_NUMEL), LARGE_NUMEL, count_sent_bytes(group)
    large_seconds = time_sum(numel)
    # Both sums took about as long: latency hides the rate of the link, so try larger tensors.
    while (
        large_seconds < SHORTEST_TIME or large_seconds <= small_seconds
    ) and numel < 16 * LARGE_NUMEL:
        numel, sent_before = numel * 4, count_sent_bytes(group)
        large_seconds = time_sum(numel)
    sent_bytes = (count_sent_bytes(group) - sent_before) / 2
    per_byte = max(large_seconds - small_seconds, 0.0) / (4 * (numel - SMALL_NUMEL))
    return ExactRate(
        max(small_seconds - per_byte * 4 * SMALL_NUMEL, 0.0), per_byte, sent_bytes / (4 * numel)
    )


def count_sent_bytes(*groups: Group) -> int:
    """Count the bytes that this worker has sent in these groups."""
    return sum(group.traffic.within + group.traffic.between for group in groups)


class ExchangeCost(NamedTuple):
    """Seconds that the exchange of a bucket takes, in three parts."""

    before: float  # on this processor, to encode
    link: float
    after: float  # on this processor, to decode


def exposed_seconds(ready: Sequence[float], costs: Sequence[ExchangeCost], needed: float) -> float:
    """Seconds from `needed` until the last of these buckets arrives; 0 if all arrive before it.

    Encoding, the link and decoding work at the same time, each on one bucket after the other.

    Args:
        ready: Second at which each bucket is full.
        costs: Seconds that each bucket takes.
        needed: Second at which all buckets are needed.
    """
    encoded = sent = decoded = needed
    if ready:
        encoded = sent = decoded = -math.inf
    for filled, cost in sorted(zip(ready, costs, strict=True), key=lambda pair: pair[0]):
        encoded = max(encoded, filled) + cost.before
        sent = max(sent, encoded) + cost.link
        decoded = max(decoded, sent) + cost.after
    return max(0.0, decoded - needed)


@dataclass
class BucketTrip:
    """One exchange of a bucket through its codec, as a leader measured it."""

    index: int  # of the bucket
    numel: int
    # Seconds of this processor, before each wait and after the last.
    coding: list[float] = field(default_factory=list)
    given: Tensor | None = None  # a sample of the leader's input
    total: Tensor | None = None  # the same elements of the coded sum


def time_coding(going: Way, trip: BucketTrip) -> Way:
    """Run `going`, and append its processor seconds to `trip.coding`.

    On a GPU this counts only the time to launch kernels.
    """
    result: Any = None
    while True:
        started = time.thread_time()
        try:
            work = going.send(result)
        except StopIteration as stop:
            trip.coding.append(time.thread_time() - started)
            coded_sum: Sum = stop.value
            return coded_sum
        trip.coding.append(time.thread_time() - started)
        result = yield work


@dataclass
class CodecTurn:
    """Figures of one step, or of one round."""

    sent: float  # bytes
    exact: float  # bytes that exact sums would have sent
    coding: float  # seconds of this processor for encoding and decoding
    shown: float  # seconds that training waited for the exchange
    exact_shown: float  # the same, predicted for exact sums


class CodecAccount:
    """Figures of one strategy's codec, turn by turn, on a leader. Other workers' stay empty."""

    def __init__(self, codec: str, compared: str = "the mean") -> None:
        self.codec, self.compared = codec, compared
        self.rate: ExactRate | None = None
        self.turns: list[CodecTurn] = []
        self.errors: list[float] = []  # relative, of each turn whose sample was finite
        self._latest: list[tuple[str, float]] = []
        # The exact sum of a sample under way, and the same elements of the coded sum.
        self._sample: tuple[Work[Tensor], Tensor] | None = None

    def add_turn(self, turn: CodecTurn) -> None:
        """Add the figures of a turn that is over."""
        self.turns.append(turn)
        self._latest += [("codec_bytes", turn.sent), ("codec_seconds", turn.coding)]

    def keep_sample(self, work: Work[Tensor], total: Tensor) -> None:
        """Keep a sample to compare when its exact sum is done.

        Args:
            work: The exact sum of the sample.
            total: The same elements of the coded sum.
        """
        self._sample = work, total

    def drop_sample(self) -> None:
        """Drop the sample, as its group has been closed."""
        self._sample = None

    def read_sample(self) -> None:
        """Wait for the sample of the last turn, and record its error."""
        if self._sample is None:
            return
        (work, total), self._sample = self._sample, None
        error = relative_error(total, work.wait())
        if math.isfinite(error):
            self.errors.append(error)
            self._latest.append(("codec_error", error))

    def take_latest(self) -> dict[str, float]:
        """Hand out the figures since the last call, for the log."""
        latest, self._latest = dict(self._latest), []
        return latest

    def facts(self) -> dict[str, Any] | None:
        """Means over all turns, as plain numbers; None if this worker coded nothing."""
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
            "link": self.rate.link_bytes_per_second,
        }


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    """Relative error |approximate - exact| / |exact|; nan if `exact` is zero."""
    norm = float(exact.double().norm())
    return float((approximate.double() - exact.double()).norm()) / norm if norm > 0 else math.nan


def sample_elements(x: Tensor, every: int, step: int) -> Tensor:
    """Copy every `every`-th element of a flat tensor, starting elsewhere in each step."""
    return x[step * SAMPLE_STEP % every :: every].clone()


@dataclass(frozen=True)
class CodecVerdict:
    """Figures of all leaders together, as the summary shows them.

    Bytes and seconds are those of one turn: a step, or a round.
    """

    codec: str
    turns: int  # in which something was sent
    bytes_sent: float  # by all leaders
    bytes_exact: float  # that exact sums would have sent
    coding_seconds: float  # of a processor, mean over leaders
    shown_seconds: float  # that training waited for the exchange, mean over leaders
    exact_shown_seconds: float  # the same, predicted for exact sums
    compared: str  # the tensor whose error was measured, in words, such as "the mean"
    relative_error: float  # |coded - exact| / |exact|, mean over turns, on a sample
    link_bytes_per_second: float  # that a leader sends
    step_seconds: float  # of a whole step
    gain: float  # predicted seconds of a step with exact sums / seconds of a step now
    words: str = ""


def judge_codec(
    facts: Iterable[dict[str, Any] | None], step: float, steps: int
) -> CodecVerdict | None:
    """Judge a codec by the facts of all workers; None if no worker coded anything.

    Args:
        facts: `CodecAccount.facts` of each worker.
        step: Seconds of a step.
        steps: Number of steps.
    """
    leader_facts = [each for each in facts if each is not None]
    if not leader_facts:
        return None

    def mean(name: str) -> float:
        return statistics.fmean(each[name] for each in leader_facts)

    turns, waited, exact_waited = leader_facts[0]["turns"], mean("shown"), mean("exact_shown")
    # Rounds are rarer than steps: spread the saved seconds over all steps.
    saved_per_step = (exact_waited - waited) * turns / max(steps, 1)
    verdict = CodecVerdict(
        codec=leader_facts[0]["codec"],
        turns=turns,
        bytes_sent=sum(each["sent"] for each in leader_facts),
        bytes_exact=sum(each["exact"] for each in leader_facts),
        coding_seconds=mean("coding"),
        shown_seconds=waited,
        exact_shown_seconds=exact_waited,
        compared=leader_facts[0]["compared"],
        relative_error=mean("error"),
        link_bytes_per_second=mean("link"),
        step_seconds=step,
        gain=max(step + saved_per_step, 1e-9) / step if step > 0 else 1.0,
    )
    return replace(verdict, words=_explain_verdict(verdict, steps))


def _explain_verdict(verdict: CodecVerdict, steps: int) -> str:
    turn = "step" if verdict.turns * 1.1 > steps else "round"
    off_by = (
        f", and {verdict.compared} was {verdict.relative_error:.2g} of its size off"
        if math.isfinite(verdict.relative_error)
        else ""
    )
    findings = (
        f"{verdict.codec} sent {_format_megabytes(verdict.bytes_sent)} a {turn} "
        "where exact sums would have sent "
        f"{_format_megabytes(verdict.bytes_exact)}; "
        f"coding took {_format_seconds(verdict.coding_seconds)} of a "
        f"processor{off_by}. On this link "
        f"({verdict.link_bytes_per_second * 8e-6:,.0f} Mbit/s out of each) "
        f"{_format_seconds(verdict.shown_seconds)} of the exchange showed, with "
        f"exact sums it would be about {_format_seconds(verdict.exact_shown_seconds)}: "
    )
    if verdict.gain >= 1.02:
        return findings + f"it paid, steps are about {verdict.gain:.2f} times as fast."
    if verdict.gain <= 0.98:
        return findings + (
            f"it did not pay, exact sums would be about {1 / verdict.gain:.2f} times as fast. "
            "Leave the codec out here."
        )
    return findings + "it made no difference to the time. Exact sums would lose nothing."


def _format_megabytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
