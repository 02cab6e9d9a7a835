"""Gossip: workers step by themselves and mix with neighbours only; no step waits for all workers.

exact (D-PSGD, Lian et al. 2017): step, then mix

    x_i = sum over j of W_ij x_j

coded (CHOCO-SGD, Koloskova et al. 2019): neighbours hold estimates of each other, which come nearer
with each message, and the mean never changes

    known_ij += coded(x_i - known_ij)
    x_i += gamma sum over j of W_ij (known_ji - known_ij)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.codec.coding import Coding, Message, exact, parts, room, seeded
from paceline.comm.bucket_layout import Bucket, BucketShape, build_buckets, cut_runs, scale_copy
from paceline.comm.group_protocol import FinishedWork, Traffic, Work
from paceline.errors import UsageError
from paceline.formatting import spell
from paceline.sync.base import Slot, Sync, check_strategy
from paceline.sync.codec_cost import SAMPLE, CodecAccount, CodecTurn, ExactRate, measure, sampled
from paceline.sync.context import SyncContext
from paceline.sync.gossip.graph import Edges, Graph, check, prove, weights

TAG = 70_000  # of messages between neighbours
Near = Sequence[tuple[int, float]]  # neighbours: (rank, weight)


@dataclass(frozen=True)
class Gossip:
    """Local steps that mix with neighbours: no step waits for all workers.

    >>> pl.start(sync=pl.Gossip(graph="exponential", codec=pl.int8()))

    p.grad is the contribution of this worker's own share, times the number of workers. `step` moves
    this worker's replica, and mixes it with neighbours afterwards. Replicas differ all the time.
    They become equal, the mean of all, when they are looked at as one: before an evaluation, at
    `run.save`, and at the end of the run.

    Args:
        graph: "ring", "exponential" (one neighbour a step, the default), "matching" (random pairs),
            "full" (then plain SGD is AllReduce), or pairs of ranks.
        codec: A coding such as `int8()` or `topk(0.01)`. Its losses are corrected later by
            themselves, so it needs no `error_feedback`. Default: exact.
        gamma: Size of a mixing step; below 1 it is more careful, for codings that lose much.
            Default: 1.
        every: Steps between two messages. Default: 1.
        bucket_mb: Size of a message in MB. Default: 8.
    """

    graph: Graph | Edges = "exponential"
    codec: Coding = field(default_factory=exact)
    gamma: float = 1.0
    every: int = 1
    bucket_mb: float = 8.0

    __repr__ = spell

    def __post_init__(self) -> None:
        check(self.graph)
        if not hasattr(self.codec, "layout"):
            raise UsageError(
                f"{self!r}: gossip wants a coding, such as int8() or topk(0.01); "
                "it corrects what is lost itself"
            )
        if not 0 < self.gamma <= 1 or self.every < 1 or not self.bucket_mb > 0:
            raise UsageError(
                f"{self!r}: gamma has to be above 0 and at most 1, "
                "every 1 or more, bucket_mb above 0"
            )
        if isinstance(self.codec, exact) and self.gamma != 1:
            raise UsageError(f"{self!r}: gamma is for codecs that lose something; leave it out")

    def begin(self, context: SyncContext) -> Sync:
        found = prove(self.graph, context.group.size)
        if context.group.size > 1:
            shown = self.graph if isinstance(self.graph, str) else "this graph"
            context.announce(
                f"gossip on {shown}: a mixing brings {context.group.size} replicas nearer by "
                f"{found:.0%} (spectral gap {found:.3f})"
            )
        return GossipSync(context, self)


@dataclass
class _MixingRound:
    """Figures of a coded mixing: bytes, time, and a sample of how far my replica is from what
    neighbours know of it.
    """

    sent: int = 0
    exact: list[int] = field(default_factory=list)  # bytes of each tensor that was sent, as it is
    coding: float = 0.0
    mine: list[Tensor] = field(default_factory=list)
    known: list[Tensor] = field(default_factory=list)

    def compare(self, mine: Tensor, known: Tensor) -> None:
        """Keep a sample of both."""
        every = max(1, mine.numel() // SAMPLE)
        self.mine.append(sampled(mine, every, 0))
        self.known.append(sampled(known, every, 0))

    def tell(self, account: CodecAccount, shown: float) -> None:
        """Add the figures of the mixing, which is over and took `shown` seconds."""
        if not self.exact or account.rate is None:
            return
        exact_shown = sum(account.rate.seconds(nbytes) for nbytes in self.exact)
        account.add(
            CodecTurn(float(self.sent), float(sum(self.exact)), self.coding, shown, exact_shown)
        )
        account.compare(FinishedWork(torch.cat(self.mine)), torch.cat(self.known))
        account.settle()


class GossipSync:
    """The running side of `Gossip`."""

    replicas_diverge = True
    exchanges_in_backward = False

    def __init__(self, context: SyncContext, plan: Gossip) -> None:
        self._context, self._plan = context, plan
        self._slots: list[Slot] = []
        self._buckets: list[Bucket] = []
        self._equal: list[Tensor] = []  # of each bucket: what all were when replicas were equal
        # by bucket, peer, and whether it is mine as that one knows it
        self._known: dict[tuple[int, int, bool], Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        self._steps = 0
        self._equals = True  # nothing has changed since replicas were equal
        self._open = False  # a step is under way
        self._others = False  # the workers have changed since replicas were equal
        self._graph = plan.graph
        self._account = (
            None
            if isinstance(plan.codec, exact)
            else CodecAccount(repr(plan.codec), "what neighbours know")
        )
        if self._account is not None:
            context.accounts.append(self._account)
        self._turn = _MixingRound()

    # ---- layout

    def attach(self, slots: Sequence[Slot]) -> None:
        self.converge()
        self._slots = list(slots)
        shapes = [
            BucketShape.of_parameter(slot.parameter)._replace(kind=("gossip", slot.shard))
            for slot in slots
        ]
        runs = cut_runs(shapes, range(len(shapes)), int(self._plan.bucket_mb * 1e6))
        self._buckets = build_buckets(
            shapes,
            runs,
            lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device),
        )
        if self._account is not None:
            for slot in slots:
                if not slot.parameter.dtype.is_floating_point:
                    self._context.announce(
                        f"{slot.name} is {slot.parameter.dtype}: it is exchanged exactly, codecs "
                        "are for real numbers"
                    )
        self._forget()
        self._measure()

    def _measure(self) -> None:
        """Measure how fast the links to my neighbours are. Collective."""
        group, account = self._context.group, self._account
        if account is None or account.rate is not None or group.size == 1 or not self._buckets:
            return
        sources, targets = self._neighbours(0)

        def send(x: Tensor) -> Work[None]:
            return group.exchange(
                [(rank, x) for rank, _ in targets],
                [(rank, torch.empty_like(x)) for rank, _ in sources],
                tag=TAG - 1,
            )

        before = group.traffic + Traffic()
        account.rate = measure(group, self._buckets[0].flat.device, send)
        self._context.probe_traffic.add_sent(group.traffic - before)

    def _forget(self) -> None:
        """Begin anew from equal replicas: all neighbours know each other."""
        self._known.clear()
        coded = not isinstance(self._plan.codec, exact)
        self._others = False
        self._equal = (
            [self._read(bucket).to(_wide(bucket.flat.dtype), copy=True) for bucket in self._buckets]
            if coded
            else []
        )

    def _read(self, bucket: Bucket) -> Tensor:
        for number, view in zip(bucket.members, bucket.views, strict=True):
            view.copy_(self._slots[number].parameter.detach())
        return bucket.flat

    def _write(self, bucket: Bucket) -> None:
        for number, view in zip(bucket.members, bucket.views, strict=True):
            self._slots[number].parameter.detach().copy_(view)

    # ---- backward: nothing travels

    def ready(self, number: int, grad: Tensor, scale: float) -> None:
        factor = scale * self._context.group.size
        value = scale_copy(grad, factor)
        self._grads[number] = self._grads[number] + value if number in self._grads else value

    def backward_done(self, where: str) -> list[tuple[int, Tensor]]:
        self._open, self._equals = True, False
        found, self._grads = list(self._grads.items()), {}
        return found

    def stepped(self, optimizer: Optimizer) -> None:
        self._equals = False

    # ---- mixing

    def commit(self) -> None:
        """End a step, and mix if that is due."""
        self._steps += 1
        self._open = False
        if (
            not self._equals
            and self._steps % self._plan.every == 0
            and self._context.group.size > 1
        ):
            begun = time.perf_counter_ns()
            self._mix(self._steps // self._plan.every - 1)
            self._context.trace.record("gossip", "exchange", begun, time.perf_counter_ns())

    def _mix(self, turn: int) -> None:
        begun, self._turn = time.perf_counter(), _MixingRound()
        equal = self._context.agreement.repeat_until_settled(
            lambda: self._mixed(turn), what="mixing"
        )
        for bucket in self._buckets:
            self._write(bucket)
        if equal:
            self._forget()
            self._equals = True
        elif self._account is not None:
            self._turn.tell(self._account, time.perf_counter() - begun)

    def _mixed(self, turn: int) -> bool:
        """Compute in each bucket what my replica becomes; whether all become the same, as once
        after the workers have changed.
        """
        if self._others:
            self._means()
            return True
        sources, targets = self._neighbours(turn)
        for index, bucket in enumerate(self._buckets):
            exactly = self._account is None or not bucket.flat.dtype.is_floating_point
            (self._mix_exact if exactly else self._mix_coded)(index, sources, targets)
        return False

    def _means(self) -> None:
        for index, bucket in enumerate(self._buckets):
            flat = self._read(bucket)
            self._context.group.all_reduce(flat, out=flat, name=f"replicas {index}").wait()
            flat.div_(self._context.group.size)

    def _neighbours(self, turn: int) -> tuple[Near, Near]:
        """Return (rank, weight) of the neighbours that I hear from, and of those that hear from
        me.
        """
        me = self._context.group.rank
        w = weights(self._graph, self._context.group.size, turn)
        sources = [
            (rank, float(w[me, rank])) for rank in range(len(w)) if rank != me and w[me, rank]
        ]
        return sources, [
            (rank, float(w[rank, me])) for rank in range(len(w)) if rank != me and w[rank, me]
        ]

    def _mix_exact(self, index: int, sources: Near, targets: Near) -> None:
        bucket = self._buckets[index]
        mine = self._read(bucket)
        theirs = {rank: torch.empty_like(mine) for rank, _ in sources}
        self._context.group.exchange(
            [(rank, mine) for rank, _ in targets], list(theirs.items()), tag=TAG + index
        ).wait()
        mine.mul_(1 - sum(weight for _, weight in sources))
        for rank, weight in sources:
            mine.add_(theirs[rank], alpha=weight)

    def _mix_coded(self, index: int, sources: Near, targets: Near) -> None:
        bucket, coding = self._buckets[index], self._plan.codec
        mine = self._read(bucket).to(_wide(bucket.flat.dtype), copy=True)
        sends, receives, began = [], [], time.thread_time()
        for rank, _ in targets:
            known = self._about(index, rank, own=True)
            whole, message = room(coding, mine.numel(), mine.device)
            pair = self._context.group.rank * 256 + rank
            coding.encode(
                (mine - known).float(), message, seeded(self._steps, index, pair, mine.device)
            )
            _learn(coding, message, known)
            sends.append((rank, whole))
            self._turn.sent += whole.nbytes
            self._turn.exact.append(bucket.flat.nbytes)
            self._turn.compare(mine, known)
        for rank, _ in sources:
            receives.append((rank, torch.empty_like(room(coding, mine.numel(), mine.device)[0])))
        self._turn.coding += time.thread_time() - began
        self._context.group.exchange(sends, receives, tag=TAG + index).wait()
        began = time.thread_time()
        for rank, whole in receives:
            _learn(coding, parts(coding, mine.numel(), whole), self._about(index, rank, own=False))
        for rank, weight in sources:
            mine.add_(self._known[index, rank, False], alpha=self._plan.gamma * weight)
        for rank, weight in targets:
            mine.sub_(self._known[index, rank, True], alpha=self._plan.gamma * weight)
        self._turn.coding += time.thread_time() - began
        bucket.flat.copy_(mine)

    def _about(self, index: int, rank: int, *, own: bool) -> Tensor:
        """Estimate that a rank has of this worker (`own`), or this worker of it.

        At first it is the value that all replicas had when they were equal.
        """
        key = (index, rank, own)
        if key not in self._known:
            self._known[key] = self._equal[index].clone()
        return self._known[key]

    def converge(self) -> None:
        """Make every replica the mean of all."""
        if self._equals:
            return
        self._context.agreement.repeat_until_settled(self._means, what="the mean of replicas")
        for bucket in self._buckets:
            self._write(bucket)
        self._forget()
        self._equals = True

    # ---- the rest of the life of a strategy

    def abort(self) -> None:
        self._grads.clear()
        self._open = False

    def join_info(self) -> Any:
        rate = None if self._account is None else self._account.rate
        return None if rate is None else list(rate)

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Let the next mixing make all replicas equal, as neighbours have changed and don't know
        each other.
        """
        self._context = context
        if not isinstance(self._graph, str):
            context.announce(
                "the graph was given as pairs of ranks, and the workers are others now: "
                "gossip goes on with graph='exponential'"
            )
            self._graph = "exponential"
        if self._account is not None and self._account.rate is None and layout is not None:
            self._account.rate = ExactRate(*layout)
        self._others, self._equals = True, False

    def load_from_peer(self, state: dict[str, Any]) -> None:
        self._steps = state["gossip"]

    def detach(self) -> None:
        self._buckets, self._known = [], {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps; replicas are equal when it is called."""
        return {"gossip": self._steps + self._open}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        found = [state for state in states if state]
        check_strategy("Gossip", found, "gossip")
        self._steps = found[0]["gossip"] if found else self._steps
        self._grads.clear()
        self._forget()
        self._equals = True


def _wide(kind: torch.dtype) -> torch.dtype:
    """Return the dtype in which replicas of this dtype are mixed, so that rounding loses
    nothing.
    """
    return torch.promote_types(kind, torch.float32) if kind.is_floating_point else kind


def _learn(coding: Coding, message: Message, known: Tensor) -> None:
    """Add a message to what is known: the same bits on both sides."""
    if known.dtype == torch.float32:
        coding.add(message, known)
        return
    news = torch.empty(known.shape, dtype=torch.float32, device=known.device)
    coding.decode(message, news)
    known.add_(news)
