"""All-gather and reduce-scatter over hosts with as many workers each: a piece goes once to each
other host, not to each of its workers.

    host 0   ranks 0 1        rail 0   ranks 0 2        a rail has one worker of each host
    host 1   ranks 2 3        rail 1   ranks 1 3

    all-gather        between   each worker's piece along its rail           0 <-> 2   1 <-> 3
                      inside    what has come, among the workers of a host   0 <-> 1   2 <-> 3
    reduce-scatter    inside    the host's sums of all pieces that a rail is due, on its worker
                      between   each sum along the rail to the worker that is due it, which adds
                                those of all hosts

Chunks of the pieces follow each other, so that the network and the memory of hosts are busy at the
same time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm import reduction
from paceline.comm.collectives import UncheckedExchange
from paceline.comm.group import (
    Group,
    Op,
    UncheckedReduceScatter,
    Work,
    WritesResults,
    gather_into,
    pieces,
)
from paceline.comm.hierarchy.chunks import cut
from paceline.comm.hierarchy.executor import Flow, Steps
from paceline.trace import Trace

# bytes: smaller pieces take less time by all ranks at once, at 1 Gbit/s between two hosts
SMALL = 128 << 10
CROSSINGS = 1 << 16  # chunks between hosts with tags of their own


def even(hosts: Sequence[int]) -> bool:
    """Whether there are several hosts with as many workers each, at least two.

    `hosts`: the host of each rank.
    """
    counts = Counter(hosts).values()
    return len(counts) > 1 and len(set(counts)) == 1 and min(counts) > 1


class Rails:
    """The ways of one worker over hosts.

    `rail`: a group of one worker of each host. `inner`, `hands`: groups of this host, for what
    comes before the network and after it. `places`: the rank of each worker on each host, in the
    order of `inner`; the hosts are in that of `rail`. Takes charge of `rail`.
    """

    def __init__(
        self, rail: Group, inner: Group, hands: Group, places: Sequence[Sequence[int]], trace: Trace
    ) -> None:
        self.rail, self._inner, self._hands, self._places, self._trace = (
            rail,
            inner,
            hands,
            places,
            trace,
        )
        self._rank, self._size = places[rail.rank][inner.rank], sum(map(len, places))
        self._others = [host for host in range(rail.size) if host != rail.rank]
        self._crossings = 0
        self._staged = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def lay(
        cls, flat: Group, inner: Group, hands: Group, hosts: Sequence[int], trace: Trace
    ) -> Rails:
        """Make the rails of the ranks of `flat`, whose `hosts` are `even`. Collective."""
        numbers = flat.gather_objects(inner.rank, name="rails")
        places = [
            sorted(
                (rank for rank, other in enumerate(hosts) if other == host), key=numbers.__getitem__
            )
            for host in dict.fromkeys(hosts)
        ]
        [rail] = [
            made for ranks in zip(*places, strict=True) if (made := flat.sub(ranks)) is not None
        ]
        return cls(rail, inner, hands, places, trace)

    # ---- all-gather

    def gather(self, x: Tensor, outs: Sequence[Tensor]) -> Iterator[Flow]:
        """Yield the flows of an all-gather of `x` into `outs`, contiguous tensors of its shape."""
        if outs[self._rank].data_ptr() != x.data_ptr():
            outs[self._rank].detach().copy_(x)
        flats = [out.detach().view(-1) for out in outs]
        for start, stop in cut(x.numel()):
            yield Flow(self._gather([flat[start:stop] for flat in flats]), stop - start)

    def _gather(self, parts: Sequence[Tensor]) -> Steps:
        """Gather a chunk, of which `parts` has the one of this rank."""
        mine, number = parts[self._rank], self._inner.rank
        begun = time.perf_counter_ns()
        yield self._cross(
            {host: mine for host in self._others},
            {host: parts[self._places[host][number]] for host in self._others},
        )
        self._trace.record("all-gather", "between", begun, time.perf_counter_ns())
        with self._trace.span("hand out", "within"):
            rooms = [[parts[rank] for rank in ranks] for ranks in self._places]
            for room, work in [
                (room, gather_into(self._hands, room[number], room)) for room in rooms
            ]:
                for part, found in zip(room, work.wait(), strict=True):
                    if found.data_ptr() != part.data_ptr():
                        part.copy_(found)

    # ---- reduce-scatter

    def reduce(self, x: Tensor, out: Tensor, op: Op) -> Iterator[Flow]:
        """Yield the flows of a reduce-scatter of `x`, whose piece for this rank goes to `out`,
        contiguous and 1-D.
        """
        source, edges = x.detach().reshape(-1), pieces(x.numel(), self._size)
        for start, stop in cut(max(after - before for before, after in edges)):
            parts = [
                source[min(before + start, after) : min(before + stop, after)]
                for before, after in edges
            ]
            yield Flow(
                self._reduce(parts, stop - start, out[start:stop], op),
                (stop - start) * self.rail.size,
            )

    def _reduce(self, parts: Sequence[Tensor], width: int, out: Tensor, op: Op) -> Steps:
        """Reduce a chunk of all pieces, `width` elements of each or less; halves are added, and
        travel, in float32.
        """
        held, added = reduction.wide(out.dtype, op), "sum" if op == "mean" else op
        sums = torch.empty((self.rail.size, width), dtype=held)
        with self._trace.span("sum", "within"):
            for ranks, total in zip(self._places, sums, strict=True):
                self._sum([parts[rank] for rank in ranks], total, added)
        came = {host: torch.empty(width, dtype=held) for host in self._others}
        begun = time.perf_counter_ns()
        yield self._cross({host: sums[host] for host in self._others}, came)
        self._trace.record("reduce-scatter", "between", begun, time.perf_counter_ns())
        total, *terms = [came.get(host, sums[host]) for host in range(self.rail.size)]
        for term in terms:
            reduction.combine(op, total, term)
        out.detach().copy_(reduction.finish(op, total, self._size)[: out.numel()])

    def _sum(self, parts: Sequence[Tensor], total: Tensor, op: Op) -> None:
        """Reduce the parts for the workers of one host inside this one, into `total` of the
        worker whose rail leads there.
        """
        staged = self._stage(parts, total)
        if isinstance(self._inner, WritesResults):
            self._inner.reduce_scatter_into(staged, total, op=op).wait()
        else:
            reduce = (
                self._inner.reduce_scatter_agreed
                if isinstance(self._inner, UncheckedReduceScatter)
                else self._inner.reduce_scatter
            )
            total.copy_(reduce(staged, op=op).wait())

    def _stage(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Lay parts one after another, each as long as `like`; in memory that the next ones
        reuse.
        """
        nbytes = len(parts) * like.numel() * like.element_size()
        if self._staged.numel() < nbytes:
            with torch.inference_mode(False):  # it outlives an evaluation that it is first used in
                self._staged = torch.empty(nbytes, dtype=torch.uint8)
        staged = self._staged[:nbytes].view(like.dtype)
        for row, part in zip(staged.view(len(parts), -1), parts, strict=True):
            row[: part.numel()].copy_(part)
            row[part.numel() :].zero_()
        return staged

    def _cross(self, sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> Work[None]:
        """Start an exchange along the rail."""
        self._crossings = (self._crossings + 1) % CROSSINGS
        exchange = (
            self.rail.exchange_agreed
            if isinstance(self.rail, UncheckedExchange)
            else self.rail.exchange
        )
        return exchange(list(sends.items()), list(recvs.items()), tag=self._crossings)
