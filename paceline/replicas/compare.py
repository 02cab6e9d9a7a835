"""Compares replicas by hash after the first step and at intervals, and stops or heals the run.

    step 100    a digest of each worker       all are equal: go on
    step 200    a digest of each worker       one differs
                a checksum of each tensor     the tensors in which a worker differs from most
       "stop"   the summary is written, and all workers raise the same error
       "heal"   wrong tensors are copied from a near worker that has the right ones; all workers
                compare once more, and go on

A worker may die in any of these calls. So each decision follows from the result of a call, which is
equal on all workers, and never from the list of workers that are present.
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
from paceline.formatting import describe_unknown_choice
from paceline.replicas.contents import (
    CHANGED,
    SAME,
    Entry,
    PreparedObjects,
    ReplicaContents,
    ReplicaDigest,
    parse_plain_value,
)
from paceline.replicas.majority import find_majority, pick_nearest_source
from paceline.state.checksum import view_bytes
from paceline.sync.abilities import HasSyncPoints
from paceline.sync.base import Sync
from paceline.sync.context import SyncContext

Differing = Literal["stop", "heal"]
DEFAULT_INTERVAL: Final = 100  # steps between two comparisons, by default
# Steps after which buffers are compared, because modules may have made them differ by then.
BUFFER_CHECK_STEPS: Final = (1, 10)
MAX_LISTED_TENSORS: Final = 3  # tensors that a message lists for each rank
ALIGNMENT: Final = 16  # each tensor in a message begins at a multiple of this number of bytes


@dataclass(frozen=True)
class Comparison:
    """Interval at which replicas are compared, and the action if they differ.

    Attributes:
        every: Steps between two comparisons. None: never. Default: "auto", which is 100 steps.
        differing: Whether to "stop" the run or to "heal" wrong replicas. Default: "stop".
    """

    every: int | Literal["auto"] | None = "auto"
    differing: Differing = "stop"

    def __post_init__(self) -> None:
        every = self.every
        if every is not None and every != "auto" and (type(every) is not int or every < 1):
            raise UsageError(
                f"compare={every!r} is not a number of steps; give 1 or more, None for never, or "
                f"'auto' for {DEFAULT_INTERVAL}"
            )
        if problem := describe_unknown_choice("differing", self.differing, Differing):
            raise UsageError(problem)
        if every is None and self.differing != "stop":
            raise UsageError(
                f"differing={self.differing!r} with compare=None: differences would not be found; "
                "leave compare out"
            )

    @property
    def is_customised(self) -> bool:
        """Whether the script wants comparisons other than the default."""
        return self.every is not None and self != Comparison()

    def __str__(self) -> str:
        return f"compare={self.every!r}, differing={self.differing!r}"


def has_sync_points(sync: Sync, replicated: HasSyncPoints | None) -> bool:
    """Whether there are steps after which all replicas are equal."""
    return not sync.replicas_diverge if replicated is None else replicated.has_sync_points


def check_comparison(comparison: Comparison, sync: Sync, replicated: HasSyncPoints | None) -> None:
    """Raise `UsageError` if replicas are to be compared but are never equal."""
    if comparison.is_customised and not has_sync_points(sync, replicated):
        raise UsageError(
            f"start({comparison}) can't be honoured: with this strategy replicas differ all the "
            "time, by design; leave it out, or give "
            "a strategy that makes them equal, such as AllReduce() or LocalSGD(16)"
        )


class Difference(NamedTuple):
    """A part of the state that differs between workers.

    Attributes:
        name: Name of the tensor or value.
        right: Ranks that agree with most workers.
        wrong: All other ranks.
        decided: Whether there is a majority. If not, the first of the largest groups is right.
        alike: Whether wrong ranks can copy the value: shape and dtype are equal.
    """

    name: str
    right_ranks: tuple[int, ...]
    wrong_ranks: tuple[int, ...]
    has_majority: bool
    is_transferable: bool


def find_differences(entries_by_rank: Sequence[Mapping[str, Entry]]) -> list[Difference]:
    """Find the parts that differ between the `ReplicaDigest.entries` of all ranks."""
    result = []
    for name in dict.fromkeys(name for rank_entries in entries_by_rank for name in rank_entries):
        entries = [rank_entries.get(name) for rank_entries in entries_by_rank]
        if any(entry is not None and entry[0] == "buffer" for entry in entries):
            states = [CHANGED if entry is None else entry[1] for entry in entries]
            right = tuple(rank for rank, state in enumerate(states) if state == SAME)
            wrong = tuple(rank for rank, state in enumerate(states) if state != SAME)
            # Otherwise the script has changed it in a way that torch doesn't count, such as
            # `buffer.data`. Such buffers may differ.
            if wrong and CHANGED not in states and len(right) >= len(wrong):
                result.append(
                    Difference(name, right, wrong, has_majority=True, is_transferable=True)
                )
            continue
        votes = {rank: repr(entry) for rank, entry in enumerate(entries)}
        _, others = find_majority(votes)
        if others:
            right = tuple(rank for rank in votes if rank not in others)
            decided = Counter(votes.values()).most_common(2)[1][1] < len(right)
            kinds = {None if entry is None else entry[0] for entry in entries}
            result.append(
                Difference(name, right, tuple(others), decided, is_transferable=len(kinds) == 1)
            )
    return result


def have_differences(summaries: Sequence[bytes]) -> bool:
    """Whether the `ReplicaDigest.pack_summary` of all ranks differ."""
    digests, buffers = zip(*(msgpack.unpackb(summary) for summary in summaries), strict=True)
    return len(set(digests)) > 1 or bool(
        find_differences(
            [{name: ["buffer", state] for name, state in states.items()} for states in buffers]
        )
    )


class ComparisonVerdict(NamedTuple):
    """The differences, which are equal on all workers, and the right values for this worker."""

    differences: list[Difference]
    text: str
    kinds: str  # the hardware of the workers, if it differs
    values: dict[str, Any]


class ReplicaComparer:
    """One worker's part in comparing replicas.

    Args:
        comparison: Interval, and the action if replicas differ.
        context: Groups and settings of the strategy.
        prepared: The models and optimizers of the run.
        sync: The strategy.
        replicated: The state of the strategy that is equal on all workers.
        event: Records an event.
        conclude: Writes the summary. Collective.
    """

    def __init__(
        self,
        comparison: Comparison,
        context: SyncContext,
        prepared: PreparedObjects,
        sync: Sync,
        replicated: HasSyncPoints | None,
        *,
        event: Callable[[str], None],
        conclude: Callable[[], None],
    ) -> None:
        are_comparable = has_sync_points(sync, replicated)
        every = DEFAULT_INTERVAL if comparison.every == "auto" else comparison.every
        self._comparison, self._interval = comparison, every if are_comparable else None
        self._context, self._contents, self._replicated = (
            context,
            ReplicaContents(prepared, apart=sync.replicas_diverge),
            replicated,
        )
        self._record_event, self._write_summary = event, conclude
        self._comparisons_made: int | None = None  # number of comparisons made
        # Steps before training began. With "auto" there is a comparison one step later, too.
        self._first_step = 0
        self._has_warned = False  # whether users had the warning about buffers

    def begin_training(self, steps: int) -> None:
        """Begin training, or continue it, after this number of steps."""
        if self._interval is not None:
            self._contents.remember_buffers()
            if self._comparisons_made is None:
                self._first_step = steps
                self._comparisons_made = self._count_due(steps)

    def _count_due(self, steps: int) -> int:
        """Number of comparisons that are due after this number of steps."""
        early = self._comparison.every == "auto" and steps > self._first_step
        return early + (0 if self._interval is None else steps // self._interval)

    def collect_facts(self) -> list[Any]:
        """Collect the facts that a joining worker needs."""
        return [self._interval, self._comparisons_made, self._first_step]

    def adopt_facts(self, facts: list[Any]) -> None:
        """Adopt the facts of the other workers."""
        self._interval, self._comparisons_made, self._first_step = facts

    def step_ended(self, steps: int, *_: Any) -> None:
        """Compare replicas after step `steps`, if that is due and they should be equal. Collective.

        Raises `ReplicasDiffer`, on all workers, if they differ and aren't healed.
        """
        if (
            self._interval is not None
            and steps in BUFFER_CHECK_STEPS
            and self._contents.has_own_buffers
            and self._context.group.size > 1
        ):
            self._warn_of_own_buffers()
        if self._interval is None or self._count_due(steps) == self._comparisons_made:
            return
        strategy_state = {} if self._replicated is None else self._replicated.replicated_state()
        if strategy_state is not None:
            self._comparisons_made = self._count_due(steps)
            if self._context.group.size > 1:
                self._compare_replicas(steps, strategy_state)

    def _warn_of_own_buffers(self) -> None:
        """Warn once of buffers that differ because each worker makes them from its own samples.

        Collective.
        """
        bodies = self._context.agreement.meet(
            "buffers of each worker", msgpack.packb(self._contents.checksum_own_buffers())
        )
        first, *others = map(msgpack.unpackb, bodies)
        names = [name for name in first if any(other.get(name) != first[name] for other in others)]
        if not names or self._has_warned:
            return
        self._has_warned = True
        frozen = [name for name in names if name in self._contents.frozen_parameters]
        if frozen:
            self._context.announce(
                f"the frozen parameter {_shorten_names(frozen)} differs between workers: "
                "the script changes it, and with this strategy replicas "
                "differ between exchanges. Each worker goes on with its own, and checkpoints have "
                "the first one's; run.mean gives the mean"
            )
        if buffers := [name for name in names if name not in frozen]:
            self._context.announce(
                f"the buffer {_shorten_names(buffers)} differs between workers: "
                "its module makes it of the samples that it sees, which are one "
                "worker's share. Each worker goes on with its own, in evaluation too, and "
                "checkpoints have the first one's; have the "
                "module use run.gather(x) or run.mean(x), if it should be made of all samples"
            )

    def _compare_replicas(self, steps: int, strategy_state: Mapping[str, Tensor]) -> None:
        """Compare replicas, and heal them or stop if they differ. Collective."""
        # First only digests are compared, which are small. Details follow if they differ.
        agreement = self._context.agreement
        digest = self._contents.make_digest(strategy_state)
        if not have_differences(agreement.meet("comparing replicas", digest.pack_summary())):
            return
        verdict = agreement.repeat_until_settled(lambda: self._find_verdict(digest))
        if not verdict.differences:
            return  # the worker that differed has died since
        text = f"replicas differ after step {steps}: {verdict.text}"
        # Different hardware rounds differently. With the default settings this is no error.
        if verdict.kinds and not self._comparison.is_customised:
            self._announce_event(
                f"{text}. They compute differently ({verdict.kinds}), which is a reason for that: "
                "replicas are not compared any more. "
                f"start(compare={DEFAULT_INTERVAL}) compares them whatever computes them"
            )
            self._interval = None
        elif self._comparison.differing == "heal" and all(
            difference.is_transferable for difference in verdict.differences
        ):
            self._heal_replicas(text, verdict, digest, strategy_state)
        else:
            self._stop_run(text, verdict)

    def _find_verdict(self, look: ReplicaDigest) -> ComparisonVerdict:
        """Find all differences, and receive the right values for this worker. Collective.

        Nothing is changed here, so the call can be repeated if a worker is lost in it.
        """
        host = self._context.agreement.host
        own_report = msgpack.packb(
            [look.entries, host, _describe_hardware(next(iter(look.parts.values())).value)]
        )
        bodies = [
            msgpack.unpackb(body)
            for body in self._context.agreement.meet("replicas that differ", own_report)
        ]
        entries_by_rank, hosts, kinds = ([body[index] for body in bodies] for index in range(3))
        different = find_differences(entries_by_rank)
        values: dict[str, Any] = {}
        if self._comparison.differing == "heal" and all(
            difference.is_transferable for difference in different
        ):
            right_entries = {
                difference.name: entries_by_rank[difference.right_ranks[0]][difference.name]
                for difference in different
            }
            values = {
                name: parse_plain_value(entry[1])
                for name, entry in right_entries.items()
                if entry[0] == "plain"
            }
            values |= self._exchange_values(
                [
                    difference
                    for difference in different
                    if right_entries[difference.name][0] != "plain"
                ],
                look,
            )
        return ComparisonVerdict(
            different,
            _describe_differences(different, hosts),
            _describe_mixed_hardware(kinds),
            values,
        )

    def _exchange_values(
        self, different: Sequence[Difference], look: ReplicaDigest
    ) -> dict[str, Tensor]:
        """Receive the right values of tensors in which this worker differs. Collective.

        All workers know all differences, so each computes all transfers by itself.
        """
        group, hosts = self._context.group, self._context.hosts
        transfers: dict[tuple[int, int], list[str]] = {}
        for difference in different:
            for rank in difference.wrong_ranks:
                transfers.setdefault(
                    (pick_nearest_source(rank, difference.right_ranks, hosts), rank), []
                ).append(difference.name)
        values = {name: part.value for name, part in look.parts.items()}
        device = next(iter(values.values())).device
        sends = [
            (target, _pack_tensors([values[name] for name in names], device))
            for (source, target), names in transfers.items()
            if source == group.rank
        ]
        receives = {
            source: names for (source, target), names in transfers.items() if target == group.rank
        }
        sizes = {
            source: sum(_padded_nbytes(values[name]) for name in names)
            for source, names in receives.items()
        }
        buffers = {
            source: torch.empty(size, dtype=torch.uint8, device=device)
            for source, size in sizes.items()
        }
        group.exchange(sends, list(buffers.items())).wait()
        received: dict[str, Tensor] = {}
        for source, names in receives.items():
            received |= zip(
                names,
                _unpack_tensors(buffers[source], [values[name] for name in names]),
                strict=True,
            )
        return received

    def _heal_replicas(
        self, text: str, verdict: ComparisonVerdict, look: ReplicaDigest, more: Mapping[str, Tensor]
    ) -> None:
        """Set the right values, and stop if replicas still differ. Collective."""
        for name, value in verdict.values.items():
            look.parts[name].set_value(value)
        if have_differences(
            self._context.agreement.meet(
                "comparing what was healed", self._contents.make_digest(more).pack_summary()
            )
        ):
            self._stop_run(f"{text}; they still do after taking over what others have", verdict)
        source_text = (
            "what most workers have"
            if all(difference.has_majority for difference in verdict.differences)
            else "what the first of them has"
        )
        self._announce_event(f"{text}; healed by {source_text}")

    def _stop_run(self, text: str, verdict: ComparisonVerdict) -> None:
        """Write the summary and raise `ReplicasDiffer`, on all workers."""
        self._record_event(text)
        self._write_summary()
        cause = (
            f"These workers compute differently ({verdict.kinds}), which may be the only reason; "
            "give them the same number of threads "
            "(paceline run --threads), or use start(compare=None)"
            if verdict.kinds
            else "Few tensors of one rank are most likely memory that failed (look at the ECC "
            "counters of its host, and test its memory); "
            "many are something that the script does on some workers only"
        )
        raise ReplicasDiffer(
            f"{text}. {cause}. start(differing='heal') goes on instead, with what most workers have"
        )

    def _announce_event(self, text: str) -> None:
        self._record_event(text)
        self._context.announce(text)


def _shorten_names(names: Sequence[str]) -> str:
    """Shorten a list of names to the first one and the number of the others."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _describe_differences(different: Sequence[Difference], hosts: Sequence[str]) -> str:
    """Describe all differences in one line, by rank."""
    by_rank: dict[int, list[str]] = {}
    for difference in different:
        for rank in difference.wrong_ranks:
            by_rank.setdefault(rank, []).append(difference.name)
    texts = []
    for rank, names in sorted(by_rank.items()):
        more = (
            f", and {len(names) - MAX_LISTED_TENSORS} more"
            if len(names) > MAX_LISTED_TENSORS
            else ""
        )
        texts.append(
            f"rank {rank} on {hosts[rank]} in {', '.join(names[:MAX_LISTED_TENSORS])}{more}"
        )
    undecided = next((d for d in different if not d.has_majority), None)
    unclear = (
        ""
        if undecided is None
        else (
            f" (from rank {undecided.right_ranks[0]} on {hosts[undecided.right_ranks[0]]}: "
            "no majority tells which of them is right)"
        )
    )
    return "; ".join(texts) + unclear


def _describe_hardware(tensor: Any) -> str:
    """Describe the hardware and settings that decide on the last bits of a worker's results."""
    if isinstance(tensor, Tensor) and tensor.is_cuda:
        return torch.cuda.get_device_name(tensor.device)
    return (
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads: "
        f"{torch.get_num_threads()}"
    )


def _describe_mixed_hardware(kinds: Sequence[str]) -> str:
    """Describe the hardware of the workers; empty if all have the same."""
    by_kind: dict[str, list[str]] = {}
    for rank, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(str(rank))
    sides = (
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {kind}"
        for kind, ranks in by_kind.items()
    )
    return "; ".join(sides) if len(by_kind) > 1 else ""


def _padded_nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor in a message, rounded up to the alignment."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _pack_tensors(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Pack the bytes of the tensors into one message, one after the other."""
    message = torch.zeros(sum(map(_padded_nbytes, tensors)), dtype=torch.uint8, device=device)
    for tensor, part in zip(
        tensors, message.split([_padded_nbytes(tensor) for tensor in tensors]), strict=True
    ):
        data = view_bytes(tensor)
        part[: data.numel()].copy_(data)
    return message


def _unpack_tensors(message: Tensor, templates: Sequence[Tensor]) -> list[Tensor]:
    """Unpack a message of `_pack_tensors` into tensors with these shapes and dtypes."""
    message_parts = message.split([_padded_nbytes(tensor) for tensor in templates])
    sizes = [tensor.numel() * tensor.element_size() for tensor in templates]
    return [
        part[:size].view(template.dtype).view(template.shape)
        for part, size, template in zip(message_parts, sizes, templates, strict=True)
    ]
