"""All-reduce as plain data: which rank sends which chunk to which rank in which round.

A schedule is built, proved correct, priced and drawn without a process; `collectives` runs it.

ring(3): chunks travel to the right. First every chunk gathers its sum, then the sums go round.

          round 0   round 1   round 2   round 3
rank 0    0 +> 1    2 +> 1    1 -> 1    0 -> 1     0 +> 1   sends chunk 0 to rank 1, which adds it
rank 1    1 +> 2    0 +> 2    2 -> 2    1 -> 2     1 -> 1   sends chunk 1 to rank 1, which keeps it
rank 2    2 +> 0    1 +> 0    0 -> 0    2 -> 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

from paceline.errors import UsageError
from paceline.formatting import format_count

PIECES = 8  # pieces that an uneven schedule cuts a tensor into
# How a value came about: ranks and partial sums, in the order in which they were added.
History = tuple["History | int", ...]


class Move(NamedTuple):
    """One transfer: `src` sends its `chunk` to `dst`, which adds it to its own or replaces its own.

    `add`: whether `dst` adds. If not, the chunk is complete, and replaces what `dst` had.
    """

    src: int
    dst: int
    chunk: int
    add: bool


class Schedule(NamedTuple):
    """An all-reduce of `size` ranks.

    name: Name of the schedule.
    size: Number of ranks.
    chunks: Length of each chunk, as a fraction of the tensor. They add up to 1.
    rounds: Moves of each round. All of them start from the state before the round. What a rank
        receives in one round is added together with its own part in the order of ranks, so every
        rank gets the same bits.
    """

    name: str
    size: int
    chunks: tuple[float, ...]
    rounds: tuple[tuple[Move, ...], ...]


class LinkSpeed(NamedTuple):
    """Speed of a link: seconds until the first byte arrives, and bytes a second after that."""

    latency_seconds: float
    bytes_per_second: float


class ScheduleNetwork(NamedTuple):
    """The network that a schedule is priced on.

    hosts: Host of each rank. All ranks of a host share its link to other hosts.
    within: Speed between two ranks of a host.
    between: Speed of every host's link, unless `links` says more.
    links: Speed of the link of each host. Default: all `between`.
    """

    hosts: Sequence[int]
    within: LinkSpeed
    between: LinkSpeed
    links: Sequence[LinkSpeed] = ()

    def link_speed(self, host: int) -> LinkSpeed:
        """Return the speed of the link of `host` to other hosts."""
        return self.links[host] if self.links else self.between


@lru_cache(maxsize=64)
def build_direct(size: int) -> Schedule:
    """Send everything to everyone at once: one round, n-1 times the tensor from each rank.

    0 <-+> 1
    0 <-+> 2      (all pairs at once)
    1 <-+> 2
    """
    moves = [Move(src, dst, 0, True) for src in range(size) for dst in range(size) if src != dst]
    return Schedule("direct", size, (1.0,), _drop_empty_rounds([moves]))


def build_ring(size: int) -> Schedule:
    """Reduce-scatter and all-gather round a ring: 2(n-1) rounds, 2(n-1)/n of the tensor from each.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.

    0 -+> 1 -+> 2 -+> 0     rank r sends chunk r-t in round t; n-1 rounds
    0 --> 1 --> 2 --> 0     then chunk r+1-t;                  n-1 rounds
    """
    add = [
        [Move(r, (r + 1) % size, (r - t) % size, True) for r in range(size)]
        for t in range(size - 1)
    ]
    keep = [
        [Move(r, (r + 1) % size, (r + 1 - t) % size, False) for r in range(size)]
        for t in range(size - 1)
    ]
    return Schedule("ring", size, _even_chunks(size), _drop_empty_rounds(add + keep))


@lru_cache(maxsize=64)
def build_owners(size: int) -> Schedule:
    """Give every rank one chunk: all send it their parts, and it sends the sum back to all.

    Two rounds, 2(n-1)/n of the tensor from each rank, n^2 messages at once: for few ranks. The
    only schedule of little traffic whose sums are in rank order and never sent unrounded.

    1, 2 +> 0    0, 2 +> 1    0, 1 +> 2
    0 -> 1, 2    1 -> 0, 2    2 -> 0, 1
    """
    add = [Move(src, dst, dst, True) for src in range(size) for dst in range(size) if src != dst]
    keep = [Move(src, dst, src, False) for src in range(size) for dst in range(size) if src != dst]
    return Schedule("owners", size, _even_chunks(size), _drop_empty_rounds([add, keep]))


def build_tree(size: int) -> Schedule:
    """Send sums up a binary tree and the result down: 2 log2(n) rounds, best for small tensors.

            0            children of r: 2r+1, 2r+2
          /   \\
         1     2         up   : 3 +> 1, 4 +> 1   then   1 +> 0, 2 +> 0
        / \\              down : 0 -> 1, 0 -> 2   then   1 -> 3, 1 -> 4
       3   4
    """
    edges = [((child - 1) // 2, child) for child in range(1, size)]
    levels = [
        list(level) for _, level in groupby(edges, key=lambda edge: (edge[1] + 1).bit_length())
    ]
    up = [[Move(child, parent, 0, True) for parent, child in level] for level in reversed(levels)]
    down = [[Move(parent, child, 0, False) for parent, child in level] for level in levels]
    return Schedule("tree", size, (1.0,), _drop_empty_rounds(up + down))


def build_halving_doubling(size: int) -> Schedule:
    """Swap halves between pairs of ranks, then quarters, and so on, and the same way back.

    2 log2(n) rounds, 2(n-1)/n of the tensor from each rank. Source: Thakur, Rabenseifner and
    Gropp, "Optimization of collective communication operations in MPICH", 2005.

    4 ranks:   0 <-> 2   1 <-> 3   halves        6 ranks: first 4 +> 0 and 5 +> 1 (they fold in),
               0 <-> 1   2 <-> 3   quarters               then as 4 ranks,
               and the same way back                      last 0 -> 4 and 1 -> 5
    """
    # The largest power of two ranks swap among themselves. The tensor has `power` chunks; in the
    # round of distance d, ranks r and r ^ d share a block of 2d chunks and take half of it each.
    power = 1 << (size.bit_length() - 1)
    distances = [power >> k for k in range(1, power.bit_length())]
    halving = [
        [
            Move(r, r ^ d, c, True)
            for r in range(power)
            for c in range(power)
            if c // (2 * d) == r // (2 * d) and (c ^ r) & d
        ]
        for d in distances
    ]
    doubling = [
        [Move(r, r ^ d, c, False) for r in range(power) for c in range(r // d * d, r // d * d + d)]
        for d in reversed(distances)
    ]
    # Extra ranks have no partner: they give their parts to a rank in the power of two at the
    # start, and get the result from it at the end.
    fold = [Move(r, r - power, c, True) for r in range(power, size) for c in range(power)]
    unfold = [Move(r - power, r, c, False) for r in range(power, size) for c in range(power)]
    return Schedule(
        "halving-doubling",
        size,
        _even_chunks(power),
        _drop_empty_rounds([fold, *halving, *doubling, unfold]),
    )


def build_uneven(rates: Sequence[float], pieces: int | None = None) -> Schedule:
    """Give every rank a chunk as large as the spare rate of its link allows.

    The tensor is cut into pieces that overlap in rounds: while one is handed out, the next is
    gathered.

        rates 4, 4, 1: rank 2 owns nothing     round 0      1            2            3
        (two of the pieces are shown)  piece 0 1, 2 +> 0    0 -> 1, 2
                                               0, 2 +> 1    1 -> 0, 2
                                       piece 1              1, 2 +> 0    0 -> 1, 2
                                                            0, 2 +> 1    1 -> 0, 2    ...

    A rank that owns a part f of the tensor sends and receives 1 + (n-2) f of it. With
    `build_owners` and `build_ring` each sends and receives 2 - 2/n, so the slowest link carries as
    little as half of that here. If all rates are alike, or with two ranks, the result is that of
    `build_owners`.

    Args:
        rates: Rate of each rank's link, in any unit.
        pieces: Number of pieces. One is right if other tensors are under way at the same time.
            Default: `PIECES` if ranks own different parts, else one.
    """
    parts = owned_fractions(rates)
    size, owning = len(rates), [rank for rank, part in enumerate(parts) if part > 0]
    pieces = pieces or (PIECES if max(parts) - min(parts) > 1e-9 else 1)
    # Piece p is gathered by its owners in round p, and handed out in round p + 1.
    rounds: list[list[Move]] = [[] for _ in range(pieces + 1)]
    for piece in range(pieces):
        for place, owner in enumerate(owning):
            chunk, others = (
                piece * len(owning) + place,
                [rank for rank in range(size) if rank != owner],
            )
            rounds[piece] += [Move(src, owner, chunk, True) for src in others]
            rounds[piece + 1] += [Move(owner, dst, chunk, False) for dst in others]
    return Schedule(
        "uneven",
        size,
        tuple(parts[owner] / pieces for owner in owning) * pieces,
        _drop_empty_rounds(rounds),
    )


def owned_fractions(rates: Sequence[float]) -> list[float]:
    """Split a tensor for `build_uneven`: each rank's part, so that links are equally busy.

    A link of rate b is busy for (1 + (n-2) f) / b seconds. If that is T for all, f is
    (T b - 1) / (n-2). Ranks for which it would be below 0 own nothing.
    """
    size = len(rates)
    if size < 3 or min(rates) <= 0:
        return [1 / size] * size
    # Find the fastest ranks that own something: drop the slowest until all parts are positive.
    order = sorted(range(size), key=lambda rank: -rates[rank])
    busy, fast = 0.0, order
    for count in range(size, 0, -1):
        fast = order[:count]
        busy = (size - 2 + count) / sum(rates[rank] for rank in fast)
        if busy * rates[fast[-1]] > 1:
            break
    return [(busy * rates[rank] - 1) / (size - 2) if rank in fast else 0.0 for rank in range(size)]


def build_hierarchical(
    hosts: Sequence[int], between: Callable[[int], Schedule] = build_ring
) -> Schedule:
    """Add up at the first rank of each host; these leaders exchange, and hand the result out.

        hosts [0, 1, 0, 1]:   2 +> 0    0 <-ring-> 1    0 -> 2
                              3 +> 1                    1 -> 3

    One copy of the tensor for each host crosses the network, whatever the order of ranks.

    Args:
        hosts: Host of each rank.
        between: Builds the schedule of the leaders from their number. Default: `build_ring`.
    """
    first: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    leaders = list(first.values())
    outer = between(len(leaders))
    chunks = range(len(outer.chunks))
    rest = [(rank, first[host]) for rank, host in enumerate(hosts) if rank != first[host]]
    gather = [Move(rank, leader, c, True) for rank, leader in rest for c in chunks]
    spread = [Move(leader, rank, c, False) for rank, leader in rest for c in chunks]
    # The schedule of the leaders numbers them from 0: put their ranks into its moves.
    middle = [
        [Move(leaders[m.src], leaders[m.dst], m.chunk, m.add) for m in moves]
        for moves in outer.rounds
    ]
    name = f"hierarchical({outer.name})"
    return Schedule(name, len(hosts), outer.chunks, _drop_empty_rounds([gather, *middle, spread]))


def _build_uneven_hosts(hosts: Sequence[int], rates: Sequence[float]) -> Schedule:
    # One rank for each host, in the order in which `build_hierarchical` picks leaders.
    places = list(dict.fromkeys(hosts))
    if len(places) == 1:
        return build_uneven([1.0] * len(hosts))
    host_rates = [rates[host] if rates else 1.0 for host in places]
    if len(places) == len(hosts):
        return build_uneven(host_rates)
    return build_hierarchical(hosts, lambda _: build_uneven(host_rates))


ScheduleName = Literal[
    "direct", "ring", "owners", "tree", "halving-doubling", "hierarchical", "uneven"
]
SCHEDULES: dict[str, Callable[[Sequence[int], Sequence[float]], Schedule]] = {
    "direct": lambda hosts, _: build_direct(len(hosts)),
    "ring": lambda hosts, _: build_ring(len(hosts)),
    "owners": lambda hosts, _: build_owners(len(hosts)),
    "tree": lambda hosts, _: build_tree(len(hosts)),
    "halving-doubling": lambda hosts, _: build_halving_doubling(len(hosts)),
    "hierarchical": lambda hosts, _: build_hierarchical(hosts),
    "uneven": _build_uneven_hosts,
}
"""Builders by name. Each takes the host of every rank, and the rate of each host's link.

One host is `[0] * n`. No rates mean that all links are alike.
"""


def build_schedule(name: str, hosts: Sequence[int], rates: Sequence[float] = ()) -> Schedule:
    """Build a schedule by its name.

    Args:
        name: One of `SCHEDULES`.
        hosts: Host of each rank, counted from 0.
        rates: Rate of each host's link, in any unit above 0. Default: all alike.

    Raises:
        UsageError: There is no such schedule, no rank, or not one rate for each host.
    """
    if name not in SCHEDULES:
        raise UsageError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    if not hosts:
        raise UsageError("a schedule is for at least one rank")
    if rates and (len(rates) != max(hosts) + 1 or min(rates) <= 0):
        raise UsageError(
            f"rates of links are {list(rates)}; "
            f"give one above 0 for each of the {max(hosts) + 1} hosts"
        )
    return SCHEDULES[name](hosts, rates)


def carried_contributions(schedule: Schedule) -> list[list[frozenset[int]]]:
    """List the ranks whose contributions each move carries, for each move of each round."""
    state = [[frozenset((rank,))] * len(schedule.chunks) for rank in range(schedule.size)]
    loads = []
    for moves in schedule.rounds:
        # All moves of a round carry the state from before the round.
        loads.append([state[m.src][m.chunk] for m in moves])
        for move, load in zip(moves, loads[-1], strict=True):
            state[move.dst][move.chunk] = state[move.dst][move.chunk] | load if move.add else load
    return loads


def check_schedule(schedule: Schedule) -> None:
    """Prove that every rank ends with every contribution exactly once, added in the same order.

    Raises `AssertionError`, which says where the schedule fails.
    """
    size, count = schedule.size, len(schedule.chunks)
    assert abs(sum(schedule.chunks) - 1) < 1e-9, f"chunks add up to {sum(schedule.chunks)}"
    everyone = set(range(size))
    state: list[list[History]] = [[(rank,) for _ in range(count)] for rank in range(size)]
    # Play all rounds with symbols: a value is the history of the additions that led to it.
    for step, moves in enumerate(schedule.rounds):
        before = [list(row) for row in state]
        assert len(set(moves)) == len(moves), f"round {step} makes a move twice"
        for (dst, chunk), group in groupby(
            sorted(moves, key=lambda m: (m.dst, m.chunk, m.src)), key=lambda m: (m.dst, m.chunk)
        ):
            into = list(group)
            assert all(m.src != dst for m in into), f"round {step}: rank {dst} sends to itself"
            if not all(m.add for m in into):
                assert len(into) == 1, (
                    f"round {step}: chunk {chunk} of rank {dst} is kept and changed at once"
                )
                assert _contributors(before[into[0].src][chunk]) == sorted(everyone), (
                    f"round {step}: {into[0]} is kept before it is complete"
                )
                state[dst][chunk] = before[into[0].src][chunk]
                continue
            terms = sorted(
                [(m.src, before[m.src][chunk]) for m in into] + [(dst, before[dst][chunk])]
            )
            state[dst][chunk] = tuple(term for _, term in terms)
            contributors = _contributors(state[dst][chunk])
            assert len(contributors) == len(set(contributors)), (
                f"round {step}: rank {dst} counts {contributors} in chunk {chunk}"
            )
    # All contributions once, and the same history everywhere: the same bits on all ranks.
    for rank in range(size):
        for chunk in range(count):
            contributors = _contributors(state[rank][chunk])
            assert contributors == sorted(everyone), (
                f"rank {rank} ends with {contributors} in chunk {chunk}"
            )
            assert state[rank][chunk] == state[0][chunk], (
                f"rank {rank} adds chunk {chunk} up in another order than rank 0"
            )


def predict_seconds(schedule: Schedule, nbytes: int, network: ScheduleNetwork) -> float:
    """Predict the seconds of an all-reduce of `nbytes`.

    Every round takes as long as its slowest link. Links send and receive at the same time.
    """
    total = 0.0
    for moves in schedule.rounds:
        sent: dict[tuple[str, int], float] = {}
        received: dict[tuple[str, int], float] = {}
        for move in moves:
            load = nbytes * schedule.chunks[move.chunk]
            src_host, dst_host = network.hosts[move.src], network.hosts[move.dst]
            # Inside a host each rank has a link of its own; moves to other hosts share the host's.
            if src_host == dst_host:
                source, target = ("rank", move.src), ("rank", move.dst)
            else:
                source, target = ("host", src_host), ("host", dst_host)
            sent[source] = sent.get(source, 0.0) + load
            received[target] = received.get(target, 0.0) + load
        total += max(
            (speed.latency_seconds + load / speed.bytes_per_second)
            for loads in (sent, received)
            for (kind, number), load in loads.items()
            for speed in [network.within if kind == "rank" else network.link_speed(number)]
        )
    return total


def count_traffic(schedule: Schedule, nbytes: int, hosts: Sequence[int]) -> tuple[float, float]:
    """Count the bytes that all ranks together send within hosts, and between hosts."""
    within = between = 0.0
    for move in (move for moves in schedule.rounds for move in moves):
        load = nbytes * schedule.chunks[move.chunk]
        if hosts[move.src] == hosts[move.dst]:
            within += load
        else:
            between += load
    return within, between


def draw_schedule(schedule: Schedule) -> str:
    """Draw a schedule as text: a row for each rank, a column for each round."""
    cells = [
        [_draw_cell(moves, rank) for moves in schedule.rounds] for rank in range(schedule.size)
    ]
    heads = [f"round {number}" for number in range(len(schedule.rounds))]
    widths = [max(len(head), *(len(row[i]) for row in cells)) for i, head in enumerate(heads)]
    label = len(f"rank {schedule.size - 1}")
    lines = [
        " " * label
        + "".join(f" | {head:<{width}}" for head, width in zip(heads, widths, strict=True))
    ]
    for rank, row in enumerate(cells):
        lines.append(
            f"{f'rank {rank}':<{label}}"
            + "".join(f" | {cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        )
    counts = [
        (schedule.size, "rank"),
        (len(schedule.chunks), "chunk"),
        (len(schedule.rounds), "round"),
    ]
    title = f"{schedule.name}: " + ", ".join(format_count(number, word) for number, word in counts)
    legend = "0 +> 1: sends chunk 0 to rank 1, which adds it; 0 -> 1: which keeps it"
    return "\n".join([title, legend, "", *(line.rstrip() for line in lines)])


def _draw_cell(moves: Iterable[Move], rank: int) -> str:
    """Draw the moves of one rank in one round."""
    sent = sorted((m for m in moves if m.src == rank), key=lambda m: (m.dst, m.chunk))
    parts = []
    for (dst, add), group in groupby(sent, key=lambda m: (m.dst, m.add)):
        parts.append(f"{_draw_chunks([m.chunk for m in group])} {'+>' if add else '->'} {dst}")
    return ", ".join(parts)


def _draw_chunks(numbers: Sequence[int]) -> str:
    consecutive = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}-{numbers[-1]}" if consecutive else " ".join(map(str, numbers))


def _even_chunks(count: int) -> tuple[float, ...]:
    return (1 / count,) * count


def _drop_empty_rounds(rounds: Iterable[list[Move]]) -> tuple[tuple[Move, ...], ...]:
    return tuple(tuple(moves) for moves in rounds if moves)


def _contributors(history: History) -> list[int]:
    """List the ranks in a history, each as often as it was added."""
    ranks: list[int] = []
    for term in history:
        ranks += [term] if isinstance(term, int) else _contributors(term)
    return sorted(ranks)


def choose_even_schedule(nbytes: int, network: ScheduleNetwork) -> tuple[Schedule, float]:
    """Choose the faster one of the two schedules with even chunks, and predict its seconds.

    Args:
        nbytes: Bytes of the all-reduce.
        network: The network. Each rank takes part.
    """
    count = len(network.hosts)
    priced = [
        (schedule, predict_seconds(schedule, nbytes, network))
        for schedule in (build_ring(count), build_owners(count))
    ]
    return min(priced, key=lambda one: one[1])
