"""Compares replicas by hash after the first step and at intervals, and stops or heals the run.

    step 100    a digest of each worker             all are the same: go on
    step 200    a digest of each worker             one is not
                the number of each of its tensors   which workers have what most don't have
       "stop"   the summary is written, and all workers raise the same error
       "heal"   wrong parts are copied from a near worker that is right, all compare once more, and
                go on

A worker may die in any of these calls. So the next step follows from the result of a call, which is
the same on all workers, and never from the list of workers that are present.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgpack
import torch
from torch import Tensor

from paceline.errors import ReplicasDiffer, UsageError
from paceline.formatting import unknown
from paceline.replicas.contents import (
    CHANGED,
    SAME,
    Entry,
    PreparedObjects,
    ReplicaContents,
    ReplicaDigest,
    plain,
)
from paceline.replicas.majority import majority, nearest
from paceline.state.checksum import flat
from paceline.sync.abilities import Replicated
from paceline.sync.base import Sync
from paceline.sync.context import SyncContext

Differing = Literal["stop", "heal"]
USUAL: Final = 100  # steps between two comparisons, where nothing else is said
# steps after which buffers are compared, as they may have become each worker's own
EARLY: Final = (1, 10)
SHOWN: Final = 3  # tensors that a message lists, of each rank
ALIGNED: Final = 16  # bytes: each tensor in a message begins at a multiple


@dataclass(frozen=True)
class Comparison:
    """How often replicas are compared, and the action if they differ.

    `every` is in steps; None: never.
    """

    every: int | Literal["auto"] | None = "auto"
    differing: Differing = "stop"

    def __post_init__(self) -> None:
        every = self.every
        if every is not None and every != "auto" and (type(every) is not int or every < 1):
            raise UsageError(
                f"compare={every!r} is not a number of steps; give 1 or more, None for never, or "
                f"'auto' for {USUAL}"
            )
        if wrong := unknown("differing", self.differing, Differing):
            raise UsageError(wrong)
        if every is None and self.differing != "stop":
            raise UsageError(
                f"differing={self.differing!r} with compare=None: nobody would see that replicas "
                "differ; leave compare out"
            )

    @property
    def asked(self) -> bool:
        """Whether the script has changed the usual comparisons."""
        return self.every is not None and self != Comparison()

    def __str__(self) -> str:
        return f"compare={self.every!r}, differing={self.differing!r}"


def has_sync_points(sync: Sync, replicated: Replicated | None) -> bool:
    """Whether there are moments at which all replicas are equal."""
    return not sync.replicas_diverge if replicated is None else replicated.has_sync_points


def check_comparison(comparison: Comparison, sync: Sync, replicated: Replicated | None) -> None:
    """Raise `UsageError` where replicas are to be compared that are never equal."""
    if comparison.asked and not has_sync_points(sync, replicated):
        raise UsageError(
            f"start({comparison}) can't be honoured: with this strategy replicas differ all the "
            "time, by design; leave it out, or give "
            "a strategy that makes them equal, such as AllReduce() or LocalSGD(16)"
        )


class Difference(NamedTuple):
    """A part of the state that differs: the ranks that agree with most, and the other ranks."""

    name: str
    right: tuple[int, ...]
    wrong: tuple[int, ...]
    # whether more ranks have it than anything else; if not, it is what the first of them has
    decided: bool
    alike: bool  # whether the wrong ranks could take it over: shape and dtype are the same


def differences(faces: Sequence[Mapping[str, Entry]]) -> list[Difference]:
    """Return the parts that differ between the `ReplicaDigest.entries` of all ranks."""
    found = []
    for name in dict.fromkeys(name for face in faces for name in face):
        entries = [face.get(name) for face in faces]
        if any(entry is not None and entry[0] == "buffer" for entry in entries):
            states = [CHANGED if entry is None else entry[1] for entry in entries]
            right = tuple(rank for rank, state in enumerate(states) if state == SAME)
            wrong = tuple(rank for rank, state in enumerate(states) if state != SAME)
            # else the script has changed it, past torch's counting
            if wrong and CHANGED not in states and len(right) >= len(wrong):
                found.append(Difference(name, right, wrong, decided=True, alike=True))
            continue
        votes = {rank: repr(entry) for rank, entry in enumerate(entries)}
        _, others = majority(votes)
        if others:
            right = tuple(rank for rank in votes if rank not in others)
            decided = Counter(votes.values()).most_common(2)[1][1] < len(right)
            forms = {None if entry is None else entry[0] for entry in entries}
            found.append(Difference(name, right, tuple(others), decided, alike=len(forms) == 1))
    return found


def suspicious(heads: Sequence[bytes]) -> bool:
    """Whether the `ReplicaDigest.head` of all ranks differ."""
    digests, buffers = zip(*(msgpack.unpackb(head) for head in heads), strict=True)
    return len(set(digests)) > 1 or bool(
        differences([{name: ["buffer", state] for name, state in of.items()} for of in buffers])
    )


class ComparisonVerdict(NamedTuple):
    """What all workers have found, and the values that this one is to take over."""

    found: list[Difference]
    text: str
    kinds: str  # how workers compute, if not all alike
    values: dict[str, Any]


class ReplicaComparer:
    """One worker's part in comparing.

    `event` notes what has happened, `conclude` writes the summary (collective).
    """

    def __init__(
        self,
        comparison: Comparison,
        context: SyncContext,
        prepared: PreparedObjects,
        sync: Sync,
        replicated: Replicated | None,
        *,
        event: Callable[[str], None],
        conclude: Callable[[], None],
    ) -> None:
        meets = has_sync_points(sync, replicated)
        every = USUAL if comparison.every == "auto" else comparison.every
        self._comparison, self._every = comparison, every if meets else None
        self._context, self._mirrored, self._replicated = (
            context,
            ReplicaContents(prepared, apart=sync.replicas_diverge),
            replicated,
        )
        self._event, self._conclude = event, conclude
        self._done: int | None = None  # how many comparisons have been made
        # steps before the first; where nothing else was asked for they are compared one step later,
        # too
        self._start = 0
        self._said = False  # whether it was said that buffers are each worker's own

    def begin(self, steps: int) -> None:
        """Begin training, or go on, after this number of steps."""
        if self._every is not None:
            self._mirrored.begin()
            if self._done is None:
                self._start = steps
                self._done = self._due(steps)

    def _due(self, steps: int) -> int:
        """Number of comparisons that are due after this number of steps."""
        early = self._comparison.every == "auto" and steps > self._start
        return early + (0 if self._every is None else steps // self._every)

    def facts(self) -> list[Any]:
        """State that a joining worker needs."""
        return [self._every, self._done, self._start]

    def learn(self, facts: list[Any]) -> None:
        """Go on where the others are, from their `facts`."""
        self._every, self._done, self._start = facts

    def step_ended(self, steps: int, *_: Any) -> None:
        """Compare replicas after step `steps`, if that is due and they should be equal. Collective.

        Raises `ReplicasDiffer`, on all workers, if they differ and aren't healed.
        """
        if (
            self._every is not None
            and steps in EARLY
            and self._mirrored.watches
            and self._context.group.size > 1
        ):
            self._see_buffers()
        if self._every is None or self._due(steps) == self._done:
            return
        more = {} if self._replicated is None else self._replicated.replicated_state()
        if more is not None:
            self._done = self._due(steps)
            if self._context.group.size > 1:
                self._compare(steps, more)

    def _see_buffers(self) -> None:
        """Say once which buffers differ because each worker makes them of its own samples.

        Collective.
        """
        bodies = self._context.agreement.meet(
            "buffers of each worker", msgpack.packb(self._mirrored.own())
        )
        first, *others = map(msgpack.unpackb, bodies)
        names = [name for name in first if any(other.get(name) != first[name] for other in others)]
        if not names or self._said:
            return
        self._said = True
        frozen = [name for name in names if name in self._mirrored.frozen]
        if frozen:
            self._context.announce(
                f"the frozen parameter {_counted(frozen)} differs between workers: "
                "the script changes it, and with this strategy replicas "
                "differ between exchanges. Each worker goes on with its own, and checkpoints have "
                "the first one's; run.mean gives the mean"
            )
        if buffers := [name for name in names if name not in frozen]:
            self._context.announce(
                f"the buffer {_counted(buffers)} differs between workers: "
                "its module makes it of the samples that it sees, which are one "
                "worker's share. Each worker goes on with its own, in evaluation too, and "
                "checkpoints have the first one's; have the "
                "module use run.gather(x) or run.mean(x), if it should be made of all samples"
            )

    def _compare(self, steps: int, more: Mapping[str, Tensor]) -> None:
        agreement = self._context.agreement
        look = self._mirrored.look(more)
        if not suspicious(agreement.meet("comparing replicas", look.head())):
            return
        verdict = agreement.repeat_until_settled(lambda: self._judge(look))
        if not verdict.found:
            return  # it was a worker that has died since
        text = f"replicas differ after step {steps}: {verdict.text}"
        if verdict.kinds and not self._comparison.asked:
            self._say(
                f"{text}. They compute differently ({verdict.kinds}), which is a reason for that: "
                "replicas are not compared any more. "
                f"start(compare={USUAL}) compares them whatever computes them"
            )
            self._every = None
        elif self._comparison.differing == "heal" and all(
            difference.alike for difference in verdict.found
        ):
            self._heal(text, verdict, look, more)
        else:
            self._stop(text, verdict)

    def _judge(self, look: ReplicaDigest) -> ComparisonVerdict:
        """Find out which workers differ in what, and receive what this one has to take over.

        Collective; changes nothing.
        """
        host = self._context.agreement.host
        mine = msgpack.packb([look.entries, host, _kind(next(iter(look.parts.values())).value)])
        bodies = [
            msgpack.unpackb(body)
            for body in self._context.agreement.meet("replicas that differ", mine)
        ]
        faces, hosts, kinds = ([body[place] for body in bodies] for place in range(3))
        found = differences(faces)
        values: dict[str, Any] = {}
        if self._comparison.differing == "heal" and all(difference.alike for difference in found):
            kept = {
                difference.name: faces[difference.right[0]][difference.name] for difference in found
            }
            values = {name: plain(entry[1]) for name, entry in kept.items() if entry[0] == "plain"}
            values |= self._hand_over(
                [difference for difference in found if kept[difference.name][0] != "plain"], look
            )
        return ComparisonVerdict(found, _described(found, hosts), _mixed(kinds), values)

    def _hand_over(self, found: Sequence[Difference], look: ReplicaDigest) -> dict[str, Tensor]:
        """Return the values that this worker takes over, in memory of their own. Collective."""
        group, hosts = self._context.group, self._context.hosts
        ways: dict[tuple[int, int], list[str]] = {}
        for difference in found:
            for rank in difference.wrong:
                ways.setdefault((nearest(rank, difference.right, hosts), rank), []).append(
                    difference.name
                )
        values = {name: part.value for name, part in look.parts.items()}
        device = next(iter(values.values())).device
        sends = [
            (to, _bundle([values[name] for name in names], device))
            for (source, to), names in ways.items()
            if source == group.rank
        ]
        mine = {source: names for (source, to), names in ways.items() if to == group.rank}
        sizes = {
            source: sum(_padded_bytes(values[name]) for name in names)
            for source, names in mine.items()
        }
        rooms = {
            source: torch.empty(size, dtype=torch.uint8, device=device)
            for source, size in sizes.items()
        }
        group.exchange(sends, list(rooms.items())).wait()
        taken: dict[str, Tensor] = {}
        for source, names in mine.items():
            taken |= zip(
                names, _unbundled(rooms[source], [values[name] for name in names]), strict=True
            )
        return taken

    def _heal(
        self, text: str, verdict: ComparisonVerdict, look: ReplicaDigest, more: Mapping[str, Tensor]
    ) -> None:
        for name, value in verdict.values.items():
            look.parts[name].become(value)
        if suspicious(
            self._context.agreement.meet(
                "comparing what was healed", self._mirrored.look(more).head()
            )
        ):
            self._stop(f"{text}; they still do after taking over what others have", verdict)
        whose = (
            "what most workers have"
            if all(difference.decided for difference in verdict.found)
            else "what the first of them has"
        )
        self._say(f"{text}; healed by {whose}")

    def _stop(self, text: str, verdict: ComparisonVerdict) -> None:
        self._event(text)
        self._conclude()
        cause = (
            f"These workers compute differently ({verdict.kinds}), which may be all there is to "
            "it; give them the same number of threads "
            "(paceline run --threads), or say start(compare=None)"
            if verdict.kinds
            else "Few tensors of one rank are most likely memory that failed (look at the ECC "
            "counters of its host, and test its memory); "
            "many are something that the script does on some workers only"
        )
        raise ReplicasDiffer(
            f"{text}. {cause}. start(differing='heal') goes on instead, with what most workers have"
        )

    def _say(self, text: str) -> None:
        self._event(text)
        self._context.announce(text)


def _counted(names: Sequence[str]) -> str:
    """Return the first of the names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _described(found: Sequence[Difference], hosts: Sequence[str]) -> str:
    """Say in one line which workers differ in what."""
    by_rank: dict[int, list[str]] = {}
    for difference in found:
        for rank in difference.wrong:
            by_rank.setdefault(rank, []).append(difference.name)
    sides = []
    for rank, names in sorted(by_rank.items()):
        more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        sides.append(f"rank {rank} on {hosts[rank]} in {', '.join(names[:SHOWN])}{more}")
    doubt = next((d for d in found if not d.decided), None)
    unclear = (
        ""
        if doubt is None
        else (
            f" (from rank {doubt.right[0]} on {hosts[doubt.right[0]]}: no majority tells which of "
            "them is right)"
        )
    )
    return "; ".join(sides) + unclear


def _kind(tensor: Any) -> str:
    """Describe the hardware and settings that decide on the last bits of what a worker computes."""
    if isinstance(tensor, Tensor) and tensor.is_cuda:
        return torch.cuda.get_device_name(tensor.device)
    return (
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads: "
        f"{torch.get_num_threads()}"
    )


def _mixed(kinds: Sequence[str]) -> str:
    """Say which workers compute how; empty if all do alike."""
    by_kind: dict[str, list[str]] = {}
    for rank, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(str(rank))
    sides = (
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {kind}"
        for kind, ranks in by_kind.items()
    )
    return "; ".join(sides) if len(by_kind) > 1 else ""


def _padded_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in a message, filled up to a multiple of `ALIGNED`."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED


def _bundle(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of the tensors, one after the other."""
    message = torch.zeros(sum(map(_padded_bytes, tensors)), dtype=torch.uint8, device=device)
    for tensor, place in zip(
        tensors, message.split([_padded_bytes(tensor) for tensor in tensors]), strict=True
    ):
        data = flat(tensor)
        place[: data.numel()].copy_(data)
    return message


def _unbundled(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut a message of `_bundle` into tensors like these."""
    places = message.split([_padded_bytes(tensor) for tensor in like])
    sizes = [tensor.numel() * tensor.element_size() for tensor in like]
    return [
        place[:size].view(x.dtype).view(x.shape)
        for place, size, x in zip(places, sizes, like, strict=True)
    ]
