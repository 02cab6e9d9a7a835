"""All-gather and reduce-scatter over hosts with the same number of workers each, along rails.

Each piece crosses the network once for each other host, not once for each of its workers.

    host 0   ranks 0 1        rail 0   ranks 0 2        a rail has one worker of each host
    host 1   ranks 2 3        rail 1   ranks 1 3

    all-gather      between   each worker's piece, along its rail             0 <-> 2   1 <-> 3
                    inside    all pieces of a rail, to the workers of a host  0 <-> 1   2 <-> 3
    reduce-scatter  inside    each worker gets its host's sums of the pieces of its rail
                    between   each sum, along the rail, to the owner of its piece, which adds them

Pieces travel in chunks, so that the network and the memory of hosts are busy at the same time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm import reduction_rules
from paceline.comm.collectives import UncheckedExchange
from paceline.comm.group_protocol import (
    Group,
    Op,
    UncheckedReduceScatter,
    Work,
    WritesResults,
    gather_into,
    piece_bounds,
)
from paceline.comm.hierarchy.chunks import cut_chunks
from paceline.comm.hierarchy.staged_executor import Flow, Steps
from paceline.trace import Trace

SMALL = 128 << 10  # bytes of a piece: smaller ones are faster by all ranks at once (at 1 Gbit/s)
CROSSINGS = 1 << 16  # chunks on a rail that may be under way at a time, each with its own tag


def is_even(hosts: Sequence[int]) -> bool:
    """Whether there are several hosts with the same number of workers each, two or more.

    `hosts`: host of each rank.
    """
    counts = Counter(hosts).values()
    return len(counts) > 1 and len(set(counts)) == 1 and min(counts) > 1


class Rails:
    """All-gather and reduce-scatter of one worker over its rail. Takes charge of `rail`.

    Args:
        rail: A group of one worker of each host, this one among them.
        inner: The workers of this host, for the work before the network.
        hands: The same workers, for the work after the network.
        places: Rank of each worker on each host. Hosts are in the order of `rail`, the workers of
            a host in the order of `inner`.
        trace: Gets the spans "between" and "within".
    """

    def __init__(
        self, rail: Group, inner: Group, hands: Group, places: Sequence[Sequence[int]], trace: Trace
    ) -> None:
        self.rail, self._inner, self._handout_group, self._places, self._trace = (
            rail,
            inner,
            hands,
            places,
            trace,
        )
        self._rank, self._size = places[rail.rank][inner.rank], sum(map(len, places))
        self._others = [host for host in range(rail.size) if host != rail.rank]
        self._crossings = 0
        # Memory of the sums inside the host, which later chunks use again.
        self._staged = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def connect_rails(
        cls, flat: Group, inner: Group, hands: Group, hosts: Sequence[int], trace: Trace
    ) -> Rails:
        """Make the rails of all ranks. Collective.

        Args:
            flat: All workers.
            inner: The workers of this host.
            hands: The same workers, in another group.
            hosts: Host of each rank of `flat`; they are `is_even`.
            trace: Gets the spans of the rails.
        """
        inner_ranks = flat.gather_objects(inner.rank, name="rails")
        places = [
            sorted(
                (rank for rank, other in enumerate(hosts) if other == host),
                key=inner_ranks.__getitem__,
            )
            for host in dict.fromkeys(hosts)
        ]
        # Every rank takes part in making every rail, and is in one of them.
        [rail] = [
            made
            for ranks in zip(*places, strict=True)
            if (made := flat.make_subgroup(ranks)) is not None
        ]
        return cls(rail, inner, hands, places, trace)

    # ---- all-gather

    def gather_flows(self, x: Tensor, outs: Sequence[Tensor]) -> Iterator[Flow]:
        """Yield the flows of an all-gather of `x` into `outs`, one for each chunk.

        `outs`: one contiguous tensor of the shape of `x` for each rank.
        """
        if outs[self._rank].data_ptr() != x.data_ptr():
            outs[self._rank].detach().copy_(x)
        flats = [out.detach().view(-1) for out in outs]
        for start, stop in cut_chunks(x.numel()):
            yield Flow(self._gather_chunk([flat[start:stop] for flat in flats]), stop - start)

    def _gather_chunk(self, parts: Sequence[Tensor]) -> Steps:
        """Gather one chunk. `parts` has that chunk of every tensor; only this rank's is filled."""
        own, inner_rank = parts[self._rank], self._inner.rank
        begun = time.perf_counter_ns()
        # Along the rail: this worker now has the chunks of its counterparts on all hosts ...
        yield self._exchange_on_rail(
            {host: own for host in self._others},
            {host: parts[self._places[host][inner_rank]] for host in self._others},
        )
        self._trace.record_span("all-gather", "between", begun, time.perf_counter_ns())
        # ... and hands them out inside its host: one gather for each host, all begun at once.
        with self._trace.measure_span("hand out", "within"):
            host_parts = [[parts[rank] for rank in host_ranks] for host_ranks in self._places]
            for places, work in [
                (places, gather_into(self._handout_group, places[inner_rank], places))
                for places in host_parts
            ]:
                for part, result in zip(places, work.wait(), strict=True):
                    if result.data_ptr() != part.data_ptr():
                        part.copy_(result)

    # ---- reduce-scatter

    def reduce_flows(self, x: Tensor, out: Tensor, op: Op) -> Iterator[Flow]:
        """Yield the flows of a reduce-scatter of `x`, one for each chunk.

        `out`: where this rank's piece goes, contiguous and of one dim.
        """
        source, edges = x.detach().reshape(-1), piece_bounds(x.numel(), self._size)
        for start, stop in cut_chunks(max(after - before for before, after in edges)):
            parts = [
                source[min(before + start, after) : min(before + stop, after)]
                for before, after in edges
            ]
            yield Flow(
                self._reduce_chunk(parts, stop - start, out[start:stop], op),
                (stop - start) * self.rail.size,
            )

    def _reduce_chunk(self, parts: Sequence[Tensor], width: int, out: Tensor, op: Op) -> Steps:
        """Reduce one chunk of all pieces: at most `width` elements of each.

        Halves are added, and travel, in float32.
        """
        held, added = (
            reduction_rules.accumulation_dtype(out.dtype, op),
            "sum" if op == "mean" else op,
        )
        # Inside the host: one row for each host on the rail, the sum of that host's piece.
        sums = torch.empty((self.rail.size, width), dtype=held)
        with self._trace.measure_span("sum", "within"):
            for ranks, total in zip(self._places, sums, strict=True):
                self._sum_in_host([parts[rank] for rank in ranks], total, added)
        received = {host: torch.empty(width, dtype=held) for host in self._others}
        begun = time.perf_counter_ns()
        yield self._exchange_on_rail({host: sums[host] for host in self._others}, received)
        self._trace.record_span("reduce-scatter", "between", begun, time.perf_counter_ns())
        # Add in the order of hosts, on every rank. The row of this host is its own sum.
        total, *terms = [received.get(host, sums[host]) for host in range(self.rail.size)]
        for term in terms:
            reduction_rules.fold_into(op, total, term)
        out.detach().copy_(reduction_rules.finish_reduction(op, total, self._size)[: out.numel()])

    def _sum_in_host(self, parts: Sequence[Tensor], total: Tensor, op: Op) -> None:
        """Sum the workers' `parts` inside this host.

        Part i is for worker i of the host at the other end, so its sum goes to worker i of this
        host, which is on the same rail: into its `total`.
        """
        staged = self._stage_parts(parts, total)
        if isinstance(self._inner, WritesResults):
            self._inner.reduce_scatter_into(staged, total, op=op).wait()
        else:
            reduce = (
                self._inner.reduce_scatter_agreed
                if isinstance(self._inner, UncheckedReduceScatter)
                else self._inner.reduce_scatter
            )
            total.copy_(reduce(staged, op=op).wait())

    def _stage_parts(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Lay parts one after another, each in a row as long as `like`, filled up with zeros.

        The memory is used again for later chunks.
        """
        nbytes = len(parts) * like.numel() * like.element_size()
        if self._staged.numel() < nbytes:
            # It may outlive the evaluation in which it is first used.
            with torch.inference_mode(False):
                self._staged = torch.empty(nbytes, dtype=torch.uint8)
        staged = self._staged[:nbytes].view(like.dtype)
        for row, part in zip(staged.view(len(parts), -1), parts, strict=True):
            row[: part.numel()].copy_(part)
            row[part.numel() :].zero_()
        return staged

    def _exchange_on_rail(self, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> Work[None]:
        """Begin an exchange along the rail: a tensor to each other host, and one from each."""
        self._crossings = (self._crossings + 1) % CROSSINGS
        exchange = (
            self.rail.exchange_agreed
            if isinstance(self.rail, UncheckedExchange)
            else self.rail.exchange
        )
        return exchange(list(sends.items()), list(recvs.items()), tag=self._crossings)
