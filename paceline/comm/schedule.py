"""All-reduce as plain data: which rank sends which chunk to whom in which round.

Built, proved, priced and drawn without a process.

ring(3): chunks travel right; first every chunk gathers its sum, then the sums go round

          round 0   round 1   round 2   round 3
rank 0    0 +> 1    2 +> 1    1 -> 1    0 -> 1          0 +> 1   sends chunk 0 to rank 1, which adds
                                                                 it
rank 1    1 +> 2    0 +> 2    2 -> 2    1 -> 2          1 -> 1   sends chunk 1 to rank 1, which
                                                                 keeps it
rank 2    2 +> 0    1 +> 0    0 -> 0    2 -> 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from paceline.errors import UsageError
from paceline.formatting import counted

PIECES = 8  # that an uneven schedule cuts a tensor into
# how a value came about: the ranks and partial sums that it is the sum of, in order
History = tuple["History | int", ...]


class Move(NamedTuple):
    """One transfer: `src` sends its `chunk` to `dst`, which adds it to its own, or (`add` false)
    keeps it in place of its own.
    """

    src: int
    dst: int
    chunk: int
    add: bool


class Schedule(NamedTuple):
    """An all-reduce of `size` ranks: `chunks` are fractions of the tensor; all moves of a round
    start from the state before it.

    What a rank receives in one round is added together with its own part in the order of ranks.
    """

    name: str
    size: int
    chunks: tuple[float, ...]
    rounds: tuple[tuple[Move, ...], ...]


class LinkSpeed(NamedTuple):
    """A link: seconds until the first byte, and bytes a second."""

    latency_seconds: float
    bytes_per_second: float


class ScheduleNetwork(NamedTuple):
    """What a schedule is priced on: the host of each rank; all ranks of a host share its link to
    the others.

    `between` is every host's link, unless `links` has that of each host.
    """

    hosts: Sequence[int]
    within: LinkSpeed
    between: LinkSpeed
    links: Sequence[LinkSpeed] = ()

    def link(self, host: int) -> LinkSpeed:
        """Return the link of a host to the others."""
        return self.links[host] if self.links else self.between


def direct(size: int) -> Schedule:
    """Exchange everything with everyone, the naive way: one round, (n-1) times the tensor from
    each.

    0 <-+> 1
    0 <-+> 2      (all pairs at once)
    1 <-+> 2
    """
    moves = [Move(src, dst, 0, True) for src in range(size) for dst in range(size) if src != dst]
    return Schedule("direct", size, (1.0,), _rounds([moves]))


def ring(size: int) -> Schedule:
    """Reduce-scatter and all-gather round a ring: 2(n-1) rounds, 2(n-1)/n of the tensor from each.

    Patarasuk and Yuan, 2009.

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
    return Schedule("ring", size, _even(size), _rounds(add + keep))


def owners(size: int) -> Schedule:
    """Give every rank a chunk: all send it their parts, and it sends the sum to all.

    Two rounds, 2(n-1)/n of the tensor from each.

    1, 2 +> 0    0, 2 +> 1    0, 1 +> 2      (n^2 messages at once: for few ranks, and the only one
                                             of little traffic
    0 -> 1, 2    1 -> 0, 2    2 -> 0, 1       whose sums are in rank order and never sent unrounded)
    """
    add = [Move(src, dst, dst, True) for src in range(size) for dst in range(size) if src != dst]
    keep = [Move(src, dst, src, False) for src in range(size) for dst in range(size) if src != dst]
    return Schedule("owners", size, _even(size), _rounds([add, keep]))


def tree(size: int) -> Schedule:
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
    return Schedule("tree", size, (1.0,), _rounds(up + down))


def halving_doubling(size: int) -> Schedule:
    """Swap halves between pairs of ranks, then quarters, ..., and back: 2 log2(n) rounds, 2(n-1)/n
    of the tensor from each. Thakur 2005.

    4 ranks:   0 <-> 2   1 <-> 3   halves          6 ranks: first 4 +> 0 and 5 +> 1 (the extra ones
                                                   fold in),
               0 <-> 1   2 <-> 3   quarters                 then as 4 ranks,
               and the same way back                        last 0 -> 4 and 1 -> 5
    """
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
    fold = [Move(r, r - power, c, True) for r in range(power, size) for c in range(power)]
    unfold = [Move(r - power, r, c, False) for r in range(power, size) for c in range(power)]
    return Schedule(
        "halving-doubling", size, _even(power), _rounds([fold, *halving, *doubling, unfold])
    )


def uneven(rates: Sequence[float], pieces: int | None = None) -> Schedule:
    """Give every rank a chunk in proportion to what the rate of its link has to spare, piece after
    piece, as pieces overlap in rounds.

        rates 4, 4, 1: rank 2 owns nothing            round 0       1                  2
                                                                    3
        (one piece of three is shown)      piece 0    1, 2 +> 0     0 -> 1, 2
                                                      0, 2 +> 1     1 -> 0, 2
                                           piece 1                  as piece 0 before
                                                                    ...

    A rank that owns a part f of the tensor sends and receives 1 + (n-2) f of it, while with
    `owners` and `ring` each has 2 - 2/n: the slowest link has as little as half of that to carry.
    Where all rates are alike, or with two ranks, these are `owners` in one piece. `pieces` may say
    how many there are: one is right where other tensors are under way at the same time.
    """
    parts = fractions(rates)
    size, owning = len(rates), [rank for rank, part in enumerate(parts) if part > 0]
    pieces = pieces or (PIECES if max(parts) - min(parts) > 1e-9 else 1)
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
        "uneven", size, tuple(parts[owner] / pieces for owner in owning) * pieces, _rounds(rounds)
    )


def fractions(rates: Sequence[float]) -> list[float]:
    """Return which part of a tensor each rank owns in `uneven`, so that all links are busy for the
    same time as far as that can be.

    A link of rate b is busy for (1 + (n-2) f) / b: where that is T for all, f is (T b - 1) / (n-2),
    and nothing where that is below 0.
    """
    size = len(rates)
    if size < 3 or min(rates) <= 0:
        return [1 / size] * size
    order = sorted(range(size), key=lambda rank: -rates[rank])
    busy, fast = 0.0, order
    for count in range(size, 0, -1):
        fast = order[:count]
        busy = (size - 2 + count) / sum(rates[rank] for rank in fast)
        if busy * rates[fast[-1]] > 1:
            break
    return [(busy * rates[rank] - 1) / (size - 2) if rank in fast else 0.0 for rank in range(size)]


def hierarchical(hosts: Sequence[int], between: Callable[[int], Schedule] = ring) -> Schedule:
    """Add up at the first rank of each host; those exchange by the schedule `between`, and hand the
    result out: one copy per host.

        hosts [0, 1, 0, 1]:   2 +> 0    0 <-ring-> 1    0 -> 2
                              3 +> 1                    1 -> 3

    `hosts` is the host of each rank: what goes between hosts depends on how many there are, not on
    where the ranks are.
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
    middle = [
        [Move(leaders[m.src], leaders[m.dst], m.chunk, m.add) for m in moves]
        for moves in outer.rounds
    ]
    name = f"hierarchical({outer.name})"
    return Schedule(name, len(hosts), outer.chunks, _rounds([gather, *middle, spread]))


def _uneven_hosts(hosts: Sequence[int], rates: Sequence[float]) -> Schedule:
    # in the order in which `hierarchical` has their first ranks
    places = list(dict.fromkeys(hosts))
    if len(places) == 1:
        return uneven([1.0] * len(hosts))
    known = [rates[host] if rates else 1.0 for host in places]
    return (
        uneven(known) if len(places) == len(hosts) else hierarchical(hosts, lambda _: uneven(known))
    )


ScheduleName = Literal[
    "direct", "ring", "owners", "tree", "halving-doubling", "hierarchical", "uneven"
]
SCHEDULES: dict[str, Callable[[Sequence[int], Sequence[float]], Schedule]] = {
    "direct": lambda hosts, _: direct(len(hosts)),
    "ring": lambda hosts, _: ring(len(hosts)),
    "owners": lambda hosts, _: owners(len(hosts)),
    "tree": lambda hosts, _: tree(len(hosts)),
    "halving-doubling": lambda hosts, _: halving_doubling(len(hosts)),
    "hierarchical": lambda hosts, _: hierarchical(hosts),
    "uneven": _uneven_hosts,
}
"""Builders by name; each takes the host of every rank (`[0] * n` for one host), and the rate of
each host's link (empty: all alike).
"""


def build(name: str, hosts: Sequence[int], rates: Sequence[float] = ()) -> Schedule:
    """Build the schedule `name` for ranks on `hosts`, whose links have these rates (none: all
    alike).

    Raises `UsageError` when there is none of that name, or there aren't as many rates above 0 as
    hosts.
    """
    if name not in SCHEDULES:
        raise UsageError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    if not hosts:
        raise UsageError("a schedule is for at least one rank")
    if rates and (len(rates) != max(hosts) + 1 or min(rates) <= 0):
        raise UsageError(
            f"rates of links are {list(rates)}; give one above 0 for each of the {max(hosts) + 1} "
            "hosts"
        )
    return SCHEDULES[name](hosts, rates)


def carried(schedule: Schedule) -> list[list[frozenset[int]]]:
    """Return, for each move of each round, the ranks whose contributions it carries."""
    state = [[frozenset((rank,))] * len(schedule.chunks) for rank in range(schedule.size)]
    loads = []
    for moves in schedule.rounds:
        loads.append([state[m.src][m.chunk] for m in moves])
        for move, load in zip(moves, loads[-1], strict=True):
            state[move.dst][move.chunk] = state[move.dst][move.chunk] | load if move.add else load
    return loads


def check(schedule: Schedule) -> None:
    """Prove that every rank ends with every contribution exactly once, added in the same order;
    `AssertionError` says where it fails.
    """
    size, count = schedule.size, len(schedule.chunks)
    assert abs(sum(schedule.chunks) - 1) < 1e-9, f"chunks add up to {sum(schedule.chunks)}"
    everyone = set(range(size))
    state: list[list[History]] = [[(rank,) for _ in range(count)] for rank in range(size)]
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
                assert _ranks(before[into[0].src][chunk]) == sorted(everyone), (
                    f"round {step}: {into[0]} is kept before it is complete"
                )
                state[dst][chunk] = before[into[0].src][chunk]
                continue
            terms = sorted(
                [(m.src, before[m.src][chunk]) for m in into] + [(dst, before[dst][chunk])]
            )
            state[dst][chunk] = tuple(term for _, term in terms)
            contributors = _ranks(state[dst][chunk])
            assert len(contributors) == len(set(contributors)), (
                f"round {step}: rank {dst} counts {contributors} in chunk {chunk}"
            )
    for rank in range(size):
        for chunk in range(count):
            contributors = _ranks(state[rank][chunk])
            assert contributors == sorted(everyone), (
                f"rank {rank} ends with {contributors} in chunk {chunk}"
            )
            assert state[rank][chunk] == state[0][chunk], (
                f"rank {rank} adds chunk {chunk} up in another order than rank 0"
            )


def seconds(schedule: Schedule, nbytes: int, network: ScheduleNetwork) -> float:
    """Price the all-reduce of `nbytes`: every round takes its slowest link, sending and
    receiving at once.
    """
    total = 0.0
    for moves in schedule.rounds:
        out: dict[tuple[str, int], float] = {}
        into: dict[tuple[str, int], float] = {}
        for move in moves:
            load = nbytes * schedule.chunks[move.chunk]
            a, b = network.hosts[move.src], network.hosts[move.dst]
            source, target = (
                (("rank", move.src), ("rank", move.dst)) if a == b else (("host", a), ("host", b))
            )
            out[source] = out.get(source, 0.0) + load
            into[target] = into.get(target, 0.0) + load
        total += max(
            (speed.latency_seconds + load / speed.bytes_per_second)
            for loads in (out, into)
            for (kind, number), load in loads.items()
            for speed in [network.within if kind == "rank" else network.link(number)]
        )
    return total


def traffic(schedule: Schedule, nbytes: int, hosts: Sequence[int]) -> tuple[float, float]:
    """Return the number of bytes that all ranks together send within hosts, and between them."""
    within = between = 0.0
    for move in (move for moves in schedule.rounds for move in moves):
        load = nbytes * schedule.chunks[move.chunk]
        if hosts[move.src] == hosts[move.dst]:
            within += load
        else:
            between += load
    return within, between


def draw(schedule: Schedule) -> str:
    """Draw a schedule: a row for each rank, a column for each round."""
    cells = [[_cell(moves, rank) for moves in schedule.rounds] for rank in range(schedule.size)]
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
    title = f"{schedule.name}: " + ", ".join(counted(number, word) for number, word in counts)
    legend = "0 +> 1: sends chunk 0 to rank 1, which adds it; 0 -> 1: which keeps it"
    return "\n".join([title, legend, "", *(line.rstrip() for line in lines)])


def _cell(moves: Iterable[Move], rank: int) -> str:
    sent = sorted((m for m in moves if m.src == rank), key=lambda m: (m.dst, m.chunk))
    parts = []
    for (dst, add), group in groupby(sent, key=lambda m: (m.dst, m.add)):
        parts.append(f"{_span([m.chunk for m in group])} {'+>' if add else '->'} {dst}")
    return ", ".join(parts)


def _span(numbers: Sequence[int]) -> str:
    whole = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}-{numbers[-1]}" if whole else " ".join(map(str, numbers))


def _even(count: int) -> tuple[float, ...]:
    return (1 / count,) * count


def _rounds(rounds: Iterable[list[Move]]) -> tuple[tuple[Move, ...], ...]:
    return tuple(tuple(moves) for moves in rounds if moves)


def _ranks(history: History) -> list[int]:
    ranks: list[int] = []
    for term in history:
        ranks += [term] if isinstance(term, int) else _ranks(term)
    return sorted(ranks)
