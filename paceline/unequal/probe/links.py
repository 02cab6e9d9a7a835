"""Measures the links between workers, by messages as training sends them.

    source                                    target
    {ping}            ------------------->
                      <-------------------    {}       half of the median of some is the latency
    {chunk} [bytes]   ------------------->    notes when it came
    {chunk} [bytes]   ------------------->
                      <-------------------    {}       at most WINDOW of them are under way
    {end}             ------------------->
                      <-------------------    {rate}   of the later part, when TCP has found its
                                                       pace

A first, short stream finds out how large chunks should be. No worker spins while others measure, as
hosts may share cores.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch

from paceline.comm.pairs import Pairs
from paceline.timings import DEFAULT_TIMINGS, ProbeTimings
from paceline.unequal.probe.rounds import Pair

WINDOW: Final = 8  # chunks under way
CHUNKS: Final = 48  # of a stream, about
FEWEST: Final = 6
SMALLEST, LARGEST = 1 << 14, 1 << 22  # bytes of a chunk
PARTS: Final = 3
WARM: Final = 0.3  # the part of a stream that isn't counted
TRIPS, SHORTEST_TRIPS = 21, 3
LONGEST_TRIPS: Final = 0.05
PACE: Final = 12  # trips that a stream takes at least: TCP doubles its pace with each
LONGEST: Final = 1.5  # seconds of a stream
MEET, GO, BACK = 0, 1, 2  # lanes


class LinkFigures(NamedTuple):
    """What the source of a pair has measured: seconds to the target, and bytes a second."""

    pair: Pair
    latency: float
    rate: float


def compute_steady_rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Bytes per second of chunks that came at these times, without the first part of the time.

    Of many chunks it is the middle one of the rates of some parts: a process that has to wait for
    its core spoils one of them.
    """
    began, end = arrivals[0][0], arrivals[-1][0]
    later = [
        index for index, (when, _) in enumerate(arrivals) if when >= began + WARM * (end - began)
    ]
    first, last = min(later[0], len(arrivals) - 2), len(arrivals) - 1
    parts = PARTS if last - first >= PARTS * FEWEST else 1
    bounds = [first + round(part * (last - first) / parts) for part in range(parts + 1)]
    return statistics.median(
        _rate_after_first(arrivals[start : stop + 1]) for start, stop in pairwise(bounds)
    )


def _rate_after_first(arrivals: Sequence[tuple[float, int]]) -> float:
    """Return the bytes a second of all chunks but the first, since that came."""
    return sum(nbytes for _, nbytes in arrivals[1:]) / max(arrivals[-1][0] - arrivals[0][0], 1e-9)


def choose_chunk_size(rate: float, seconds: float) -> int:
    """Return the bytes of a chunk of a stream that takes so long at this rate."""
    return int(min(max(rate * seconds / CHUNKS, SMALLEST), LARGEST))


def choose_stream_seconds(latency: float, seconds: float) -> float:
    """Seconds a stream must last, at least `seconds`, for TCP to find its pace at this latency."""
    return min(max(seconds, 2 * PACE * latency), LONGEST)


class LinkMeter:
    """One worker's part in measuring links. Every method is collective over the pairs."""

    def __init__(self, pairs: Pairs, timings: ProbeTimings = DEFAULT_TIMINGS.probe) -> None:
        self._pairs, self._timings = pairs, timings
        self._known_rates: dict[Pair, LinkFigures] = {}

    def meet_workers(self) -> None:
        """Wait until all workers are here, asleep."""
        if self._pairs.rank:
            self._pairs.send(0, MEET, {})
            self._pairs.receive(0, MEET, what="word to go on").wait(self._timings.word)
            return
        for rank in range(1, self._pairs.size):
            self._pairs.receive(rank, MEET, what="word that it is ready").wait(self._timings.ready)
        for rank in range(1, self._pairs.size):
            self._pairs.send(rank, MEET, {})

    def measure_alone(self, rounds: Iterable[Sequence[Pair]], seconds: float) -> list[LinkFigures]:
        """Measure the pairs of each round; return the figures for which this worker is the source.

        No worker is in a round twice.
        """
        found = []
        for pairs in rounds:
            self.meet_workers()
            for source, target in pairs:
                if source == self._pairs.rank:
                    found.append(self._measure_link(target, seconds))
                elif target == self._pairs.rank:
                    self._serve_source(source)
        self._known_rates |= {figures.pair: figures for figures in found}
        return found

    def measure_crowded(
        self, rounds: Iterable[Sequence[Pair]], seconds: float
    ) -> list[LinkFigures]:
        """Measure the pairs of each round, for so long, in which workers send and receive at once.

        All of them were measured alone.
        """
        found = []
        for pairs in rounds:
            self.meet_workers()
            mine = [self._known_rates[pair] for pair in pairs if pair[0] == self._pairs.rank]
            with _LinkServer(
                self, [source for source, target in pairs if target == self._pairs.rank]
            ):
                for figures in mine:
                    target = figures.pair[1]
                    rate = self._send_stream(
                        target, choose_chunk_size(figures.rate, seconds), seconds
                    )
                    self._pairs.send(target, GO, {"over": True})
                    found.append(figures._replace(rate=rate))
        return found

    def serve_sources(self, sources: Sequence[int]) -> None:
        """Answer these workers until they have measured."""
        for source in sources:
            self._serve_source(source)

    def _measure_link(self, target: int, seconds: float) -> LinkFigures:
        trips: list[float] = []
        while len(trips) < SHORTEST_TRIPS or (len(trips) < TRIPS and sum(trips) < LONGEST_TRIPS):
            began = time.perf_counter()
            self._pairs.send(target, GO, {"ping": True})
            self._pairs.receive(target, BACK, what="an answer").wait(self._timings.answer)
            trips.append(time.perf_counter() - began)
        latency = statistics.median(trips[1:]) / 2  # the first opens the connection
        length = choose_stream_seconds(latency, seconds)
        rate = self._send_stream(
            target, 4 * SMALLEST if latency < LONGEST_TRIPS else SMALLEST, length / 3
        )
        rate = self._send_stream(target, choose_chunk_size(rate, length), length)
        self._pairs.send(target, GO, {"over": True})
        return LinkFigures((self._pairs.rank, target), latency, rate)

    def _send_stream(self, target: int, nbytes: int, seconds: float) -> float:
        """Send chunks for so long, and return the rate at which they came."""
        chunk, sent, answered = torch.zeros(nbytes, dtype=torch.uint8), 0, 0
        end = time.perf_counter() + seconds
        while sent < FEWEST or time.perf_counter() < end:
            self._pairs.send(target, GO, {"chunk": True}, [chunk], what="a stream of chunks")
            sent += 1
            if sent - answered >= WINDOW:
                self._pairs.receive(target, BACK, what="an answer").wait(self._timings.answer)
                answered += 1
        self._pairs.send(target, GO, {"end": True})
        while "rate" not in (
            head := self._pairs.receive(target, BACK, what="an answer")
            .wait(self._timings.answer)
            .head
        ):
            pass
        return float(head["rate"])

    def _serve_source(self, source: int) -> None:
        arrivals: list[tuple[float, int]] = []
        while (
            "over"
            not in (
                message := self._pairs.receive(source, GO, what="a stream of chunks").wait(
                    self._timings.answer
                )
            ).head
        ):
            if "end" in message.head:
                self._pairs.send(source, BACK, {"rate": compute_steady_rate(arrivals)})
                arrivals = []
                continue
            if "chunk" in message.head:
                arrivals.append((time.perf_counter(), message.tensors[0].numel()))
            self._pairs.send(source, BACK, {})


class _LinkServer:
    """Answers other workers in a thread, while this one measures."""

    def __init__(self, meter: LinkMeter, sources: Sequence[int]) -> None:
        self._meter, self._sources = meter, sources
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve_all, name="paceline probe", daemon=True)

    def _serve_all(self) -> None:
        try:
            self._meter.serve_sources(self._sources)
        except BaseException as error:  # noqa: BLE001  it is raised where the block ends
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._thread.join()  # its waits have deadlines
            if self._error is not None:
                raise self._error
