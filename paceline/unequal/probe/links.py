"""Measures the links between workers, with the same kind of messages as training.

    source                                    target
    {ping}            ------------------->
                      <-------------------    {}       the latency is half of the median round trip
    {chunk} [bytes]   ------------------->    notes the time of arrival
    {chunk} [bytes]   ------------------->
                      <-------------------    {}       at most WINDOW chunks are under way
    {end}             ------------------->
                      <-------------------    {rate}   of the later part, once TCP has found its
                                                       pace

A first, short stream shows how large chunks should be. No worker spins while others measure, as
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
CHUNKS: Final = 48  # chunks of a stream, about
FEWEST: Final = 6  # chunks of a stream, or of a part of it, at least
SMALLEST, LARGEST = 1 << 14, 1 << 22  # bytes of a chunk
PARTS: Final = 3  # parts of a long stream: the median of their rates counts
WARM: Final = 0.3  # first part of a stream, which isn't counted
TRIPS, SHORTEST_TRIPS = 21, 3  # pings: at most, and at least if they take long
LONGEST_TRIPS: Final = 0.05  # seconds of all pings, about
# round trips that a stream takes at least: TCP doubles its pace with each of the first ones
PACE: Final = 12
LONGEST: Final = 1.5  # seconds of a stream, at most
# Lanes of messages: meetings, from a source to a target, and back.
MEET, GO, BACK = 0, 1, 2


class LinkFigures(NamedTuple):
    """Latency and rate of a link, measured by its source."""

    pair: Pair
    latency: float  # seconds from the source to the target
    rate: float  # bytes per second


def compute_steady_rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Compute the rate of a stream in bytes per second, without its first part.

    A long stream is divided into parts, and the median of their rates counts: a process that has
    to wait for its core spoils only one of them.

    Args:
        arrivals: Time in seconds and number of bytes of each chunk, in order.
    """
    # Leave out the time in which TCP finds its pace.
    began, end = arrivals[0][0], arrivals[-1][0]
    later = [
        index for index, (when, _) in enumerate(arrivals) if when >= began + WARM * (end - began)
    ]
    first, last = min(later[0], len(arrivals) - 2), len(arrivals) - 1
    count = PARTS if last - first >= PARTS * FEWEST else 1
    bounds = [first + round(part * (last - first) / count) for part in range(count + 1)]
    return statistics.median(
        _rate_after_first(arrivals[start : stop + 1]) for start, stop in pairwise(bounds)
    )


def _rate_after_first(arrivals: Sequence[tuple[float, int]]) -> float:
    """Bytes per second of all chunks after the first one, since its arrival."""
    return sum(nbytes for _, nbytes in arrivals[1:]) / max(arrivals[-1][0] - arrivals[0][0], 1e-9)


def choose_chunk_size(rate: float, seconds: float) -> int:
    """Choose the bytes of a chunk for a stream of `seconds` at a rate in bytes per second."""
    return int(min(max(rate * seconds / CHUNKS, SMALLEST), LARGEST))


def choose_stream_seconds(latency: float, seconds: float) -> float:
    """Choose the seconds of a stream, so that TCP finds its pace at this latency.

    It lasts at least `seconds`, and at most LONGEST.
    """
    return min(max(seconds, 2 * PACE * latency), LONGEST)


class LinkMeter:
    """One worker's part in measuring links.

    All workers call the public methods in the same order, with the same rounds.
    """

    def __init__(self, pairs: Pairs, timings: ProbeTimings = DEFAULT_TIMINGS.probe) -> None:
        self._pairs, self._timings = pairs, timings
        self._known_rates: dict[Pair, LinkFigures] = {}

    def meet_workers(self) -> None:
        """Wait until all workers have come; they sleep meanwhile."""
        # Each tells rank 0 that it is ready, and rank 0 tells all to go on.
        if self._pairs.rank:
            self._pairs.send(0, MEET, {})
            self._pairs.receive(0, MEET, what="word to go on").wait(self._timings.word)
            return
        for rank in range(1, self._pairs.size):
            self._pairs.receive(rank, MEET, what="word that it is ready").wait(self._timings.ready)
        for rank in range(1, self._pairs.size):
            self._pairs.send(rank, MEET, {})

    def measure_alone(self, rounds: Iterable[Sequence[Pair]], seconds: float) -> list[LinkFigures]:
        """Measure the pairs of each round at the same time, one round after another.

        Args:
            rounds: Pairs of ranks; no rank is in a round twice.
            seconds: Duration of a stream, about.

        Returns:
            The figures of pairs whose source is this worker.
        """
        measured = []
        for pairs in rounds:
            # No link is measured while the round before still uses one.
            self.meet_workers()
            for source, target in pairs:
                if source == self._pairs.rank:
                    measured.append(self._measure_link(target, seconds))
                elif target == self._pairs.rank:
                    self._serve_source(source)
        self._known_rates |= {figures.pair: figures for figures in measured}
        return measured

    def measure_crowded(
        self, rounds: Iterable[Sequence[Pair]], seconds: float
    ) -> list[LinkFigures]:
        """Measure the pairs of each round, in which a worker may send and receive at once.

        Args:
            rounds: Pairs of ranks, all of them measured by `measure_alone` before.
            seconds: Duration of a stream, about.

        Returns:
            The figures of pairs whose source is this worker, with the new rates.
        """
        measured = []
        for pairs in rounds:
            self.meet_workers()
            outgoing = [self._known_rates[pair] for pair in pairs if pair[0] == self._pairs.rank]
            sources = [source for source, target in pairs if target == self._pairs.rank]
            # A thread answers the sources, as this one is busy with its own stream.
            with _LinkServer(self, sources):
                for figures in outgoing:
                    target = figures.pair[1]
                    rate = self._send_stream(
                        target, choose_chunk_size(figures.rate, seconds), seconds
                    )
                    self._pairs.send(target, GO, {"over": True})
                    measured.append(figures._replace(rate=rate))
        return measured

    def serve_sources(self, sources: Sequence[int]) -> None:
        """Answer these workers, one after another, until each has measured."""
        for source in sources:
            self._serve_source(source)

    def _measure_link(self, target: int, seconds: float) -> LinkFigures:
        """Measure the latency and the rate from this worker to another."""
        trips: list[float] = []
        while len(trips) < SHORTEST_TRIPS or (len(trips) < TRIPS and sum(trips) < LONGEST_TRIPS):
            began = time.perf_counter()
            self._pairs.send(target, GO, {"ping": True})
            self._pairs.receive(target, BACK, what="an answer").wait(self._timings.answer)
            trips.append(time.perf_counter() - began)

        # The first trip opens the connection, so it isn't counted.
        latency = statistics.median(trips[1:]) / 2
        length = choose_stream_seconds(latency, seconds)

        # A short stream of small chunks gives the chunk size of the second, which counts.
        rate = self._send_stream(
            target, 4 * SMALLEST if latency < LONGEST_TRIPS else SMALLEST, length / 3
        )
        rate = self._send_stream(target, choose_chunk_size(rate, length), length)
        self._pairs.send(target, GO, {"over": True})
        return LinkFigures((self._pairs.rank, target), latency, rate)

    def _send_stream(self, target: int, nbytes: int, seconds: float) -> float:
        """Send chunks for a number of seconds; the target tells the rate of their arrival."""
        chunk, sent, answered = torch.zeros(nbytes, dtype=torch.uint8), 0, 0
        end = time.perf_counter() + seconds
        while sent < FEWEST or time.perf_counter() < end:
            self._pairs.send(target, GO, {"chunk": True}, [chunk], what="a stream of chunks")
            sent += 1
            # Wait for an answer once WINDOW chunks are under way.
            if sent - answered >= WINDOW:
                self._pairs.receive(target, BACK, what="an answer").wait(self._timings.answer)
                answered += 1
        self._pairs.send(target, GO, {"end": True})

        # Answers to the last chunks come before the rate.
        while "rate" not in (
            head := self._pairs.receive(target, BACK, what="an answer")
            .wait(self._timings.answer)
            .head
        ):
            pass
        return float(head["rate"])

    def _serve_source(self, source: int) -> None:
        """Answer a worker's pings, chunks and ends of streams, until it has measured."""
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
    """Answers other workers in a thread, while the caller measures its own links.

    It is a context manager: at the end of the block it waits for the thread, and raises its error.
    """

    def __init__(self, meter: LinkMeter, sources: Sequence[int]) -> None:
        self._meter, self._sources = meter, sources
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve_all, name="paceline probe", daemon=True)

    def _serve_all(self) -> None:
        try:
            self._meter.serve_sources(self._sources)
        # Any error is raised again at the end of the block, in the thread of the caller.
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After an error of the block, the thread may wait for a message that never comes.
        if error is None:
            self._thread.join()  # its waits have deadlines
            if self._error is not None:
                raise self._error
