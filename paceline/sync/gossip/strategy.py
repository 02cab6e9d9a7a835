"""Gossip: workers step on their own and mix with neighbours; no step waits for all workers.

Exact (D-PSGD, Lian et al. 2017): each worker steps, then takes a weighted mean of its neighbours.

    x_i = sum over j of W_ij x_j

Coded (CHOCO-SGD, Koloskova et al. 2019): known_ij is the estimate of x_i that neighbour j has.
Worker i keeps the same estimate, bit by bit. Each message brings it nearer to x_i, and the mean of
all x never changes.

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

from paceline.codec.coding import (
    Coding,
    Message,
    exact,
    make_generator,
    make_message,
    split_message,
)
from paceline.comm.bucket_layout import Bucket, BucketShape, build_buckets, cut_runs, scale_copy
from paceline.comm.group_protocol import FinishedWork, Traffic, Work
from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.sync.base import Slot, Sync, check_strategy
from paceline.sync.codec_cost import (
    SAMPLE_NUMEL,
    CodecAccount,
    CodecTurn,
    ExactRate,
    measure_exact_rate,
    sample_elements,
)
from paceline.sync.context import SyncContext
from paceline.sync.gossip.graph import Edges, Graph, build_weights, check_graph, prove_mixing

MESSAGE_TAG = 70_000  # of messages between neighbours; + index of the bucket
Neighbours = Sequence[tuple[int, float]]  # neighbours: (rank, weight)


@dataclass(frozen=True)
class Gossip:
    """Let each worker step on its own, and mix its replica with neighbours of a graph.

    >>> pl.start(sync=pl.Gossip(graph="exponential", codec=pl.int8()))

    p.grad is the gradient of this worker's share, with its weight in the global batch times the
    number of workers. `step` moves this worker's replica. Afterwards the replica is mixed with
    those of neighbours, and no step waits for all workers. Replicas always differ. They are set to
    their mean before an evaluation, at `run.save`, and at the end of the run.

    Args:
        graph: "ring", "exponential" (one neighbour a step, the default), "matching" (random pairs),
            "full" (then plain SGD is AllReduce), or pairs of ranks.
        codec: A coding such as `int8()` or `topk(0.01)`. Later messages correct its errors, so it
            needs no `error_feedback`. Default: exact.
        gamma: Size of a mixing step, above 0 to 1. Codings with large errors need less than 1.
            Default: 1.
        every: Steps between two messages. Default: 1.
        bucket_mb: Size of a message in MB. Default: 8.

    Raises:
        UsageError: A value is out of its range, or the codec isn't a coding.
    """

    graph: Graph | Edges = "exponential"
    codec: Coding = field(default_factory=exact)
    gamma: float = 1.0
    every: int = 1
    bucket_mb: float = 8.0

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        check_graph(self.graph)
        if not hasattr(self.codec, "layout"):
            raise UsageError(
                f"{self!r}: gossip wants a coding, such as int8() or topk(0.01), without "
                "error_feedback: it corrects errors itself"
            )
        if not 0 < self.gamma <= 1 or self.every < 1 or not self.bucket_mb > 0:
            raise UsageError(
                f"{self!r}: gamma must be above 0 and at most 1, every 1 or more, bucket_mb above 0"
            )
        if isinstance(self.codec, exact) and self.gamma != 1:
            raise UsageError(f"{self!r}: gamma is for lossy codecs; leave it out")

    def begin(self, context: SyncContext) -> Sync:
        gap = prove_mixing(self.graph, context.group.size)
        if context.group.size > 1:
            graph = self.graph if isinstance(self.graph, str) else "this graph"
            context.announce(
                f"gossip on {graph}: a mixing brings {context.group.size} replicas nearer by "
                f"{gap:.0%} (spectral gap {gap:.3f})"
            )
        return GossipSync(context, self)


@dataclass
class _MixingRound:
    """Figures of a coded mixing, and samples of this replica and of its estimates."""

    sent_bytes: int = 0  # coded bytes
    exact_bytes: list[int] = field(
        default_factory=list
    )  # bytes of each sent tensor without a codec
    coding_seconds: float = 0.0  # processor seconds
    replica_samples: list[Tensor] = field(default_factory=list)  # samples of this replica
    estimate_samples: list[Tensor] = field(
        default_factory=list
    )  # the same elements of a neighbour's estimate

    def keep_samples(self, replica: Tensor, estimate: Tensor) -> None:
        """Keep a sample of a replica, and of a neighbour's estimate of it."""
        every = max(1, replica.numel() // SAMPLE_NUMEL)
        self.replica_samples.append(sample_elements(replica, every, 0))
        self.estimate_samples.append(sample_elements(estimate, every, 0))

    def report_to(self, account: CodecAccount, shown: float) -> None:
        """Add the figures of the finished mixing, which took `shown` seconds, to the account."""
        if not self.exact_bytes or account.rate is None:
            return
        exact_shown = sum(account.rate.predict_seconds(nbytes) for nbytes in self.exact_bytes)
        account.add_turn(
            CodecTurn(
                float(self.sent_bytes),
                float(sum(self.exact_bytes)),
                self.coding_seconds,
                shown,
                exact_shown,
            )
        )
        account.keep_sample(
            FinishedWork(torch.cat(self.replica_samples)), torch.cat(self.estimate_samples)
        )
        account.read_sample()


class GossipSync:
    """The running side of `Gossip`.

    While `_are_equal`, there are no `_estimates`. Later each estimate begins as a copy of
    `_common_values`, so that both sides of a pair begin alike. If `_workers_changed`, estimates
    don't fit any more, and the next mixing takes the mean of all replicas. `_step_open` is true
    from the first backward of a step to its `commit`.
    """

    replicas_diverge = True
    exchanges_in_backward = False

    def __init__(self, context: SyncContext, plan: Gossip) -> None:
        self._context, self._options = context, plan
        self._slots: list[Slot] = []
        self._buckets: list[Bucket] = []
        # Per bucket: values of all replicas when they were last equal. Only with a codec.
        self._common_values: list[Tensor] = []
        # By bucket, neighbour, and direction. True: the neighbour's estimate of this replica.
        # False: this worker's estimate of the neighbour's replica.
        self._estimates: dict[tuple[int, int, bool], Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        self._steps = 0
        self._are_equal = True  # replicas are equal
        self._step_open = False  # a step is under way
        self._workers_changed = False  # the workers have changed since replicas were last equal
        self._graph = plan.graph
        self._account = (
            None
            if isinstance(plan.codec, exact)
            else CodecAccount(repr(plan.codec), "what neighbours know")
        )
        if self._account is not None:
            context.accounts.append(self._account)
        self._mixing = _MixingRound()

    # ---- layout

    def attach(self, slots: Sequence[Slot]) -> None:
        self.converge()
        self._slots = list(slots)
        shapes = [
            BucketShape.of_parameter(slot.parameter)._replace(kind=("gossip", slot.shard))
            for slot in slots
        ]
        runs = cut_runs(shapes, range(len(shapes)), int(self._options.bucket_mb * 1e6))
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
        self._forget_estimates()
        self._measure_links()

    def _measure_links(self) -> None:
        """Measure how fast the links to this worker's neighbours are. Collective."""
        group, account = self._context.group, self._account
        if account is None or account.rate is not None or group.size == 1 or not self._buckets:
            return
        sources, targets = self._find_neighbours(0)

        def exchange_once(flat: Tensor) -> Work[None]:
            return group.exchange(
                [(rank, flat) for rank, _ in targets],
                [(rank, torch.empty_like(flat)) for rank, _ in sources],
                tag=MESSAGE_TAG - 1,
            )

        before = group.traffic + Traffic()
        account.rate = measure_exact_rate(group, self._buckets[0].flat.device, exchange_once)
        self._context.probe_traffic.add_sent(group.traffic - before)

    def _forget_estimates(self) -> None:
        """Drop all estimates, as replicas are equal: all neighbours know each other exactly."""
        self._estimates.clear()
        coded = not isinstance(self._options.codec, exact)
        self._workers_changed = False
        self._common_values = (
            [
                self._read_parameters(bucket).to(_mixing_dtype(bucket.flat.dtype), copy=True)
                for bucket in self._buckets
            ]
            if coded
            else []
        )

    def _read_parameters(self, bucket: Bucket) -> Tensor:
        for slot_index, view in zip(bucket.members, bucket.views, strict=True):
            view.copy_(self._slots[slot_index].parameter.detach())
        return bucket.flat

    def _write_parameters(self, bucket: Bucket) -> None:
        for slot_index, view in zip(bucket.members, bucket.views, strict=True):
            self._slots[slot_index].parameter.detach().copy_(view)

    # ---- backward: nothing travels

    def take_gradient(self, number: int, grad: Tensor, scale: float) -> None:
        factor = scale * self._context.group.size
        value = scale_copy(grad, factor)
        self._grads[number] = self._grads[number] + value if number in self._grads else value

    def end_backward(self, where: str) -> list[tuple[int, Tensor]]:
        self._step_open, self._are_equal = True, False
        gradients, self._grads = list(self._grads.items()), {}
        return gradients

    def note_optimizer_step(self, optimizer: Optimizer) -> None:
        self._are_equal = False

    # ---- mixing

    def commit(self) -> None:
        """End a step, and mix replicas if that is due."""
        self._steps += 1
        self._step_open = False
        if (
            not self._are_equal
            and self._steps % self._options.every == 0
            and self._context.group.size > 1
        ):
            begun = time.perf_counter_ns()
            self._mix_replicas(self._steps // self._options.every - 1)
            self._context.trace.record_span("gossip", "exchange", begun, time.perf_counter_ns())

    def _mix_replicas(self, turn: int) -> None:
        begun, self._mixing = time.perf_counter(), _MixingRound()
        # If a worker is lost, the mixing is repeated. Parameters are written only afterwards, so
        # each try begins with the same replicas.
        equal = self._context.agreement.repeat_until_settled(
            lambda: self._compute_mixing(turn), what="mixing"
        )
        for bucket in self._buckets:
            self._write_parameters(bucket)
        if equal:
            self._forget_estimates()
            self._are_equal = True
        elif self._account is not None:
            self._mixing.report_to(self._account, time.perf_counter() - begun)

    def _compute_mixing(self, turn: int) -> bool:
        """Compute the mixed replica in the buckets; say whether all replicas become equal.

        They do in the first mixing after workers have changed.
        """
        if self._workers_changed:
            self._compute_means()
            return True
        sources, targets = self._find_neighbours(turn)
        for index, bucket in enumerate(self._buckets):
            exactly = self._account is None or not bucket.flat.dtype.is_floating_point
            (self._mix_exact if exactly else self._mix_coded)(index, sources, targets)
        return False

    def _compute_means(self) -> None:
        """Compute the mean of all replicas in the buckets. Collective."""
        for index, bucket in enumerate(self._buckets):
            flat = self._read_parameters(bucket)
            self._context.group.all_reduce(flat, out=flat, name=f"replicas {index}").wait()
            flat.div_(self._context.group.size)

    def _find_neighbours(self, turn: int) -> tuple[Neighbours, Neighbours]:
        """Look up the neighbours that send to this rank, and those that receive from it."""
        own_rank = self._context.group.rank
        matrix = build_weights(self._graph, self._context.group.size, turn)
        others = [rank for rank in range(len(matrix)) if rank != own_rank]
        return (
            [(rank, float(matrix[own_rank, rank])) for rank in others if matrix[own_rank, rank]],
            [(rank, float(matrix[rank, own_rank])) for rank in others if matrix[rank, own_rank]],
        )

    def _mix_exact(self, index: int, sources: Neighbours, targets: Neighbours) -> None:
        bucket = self._buckets[index]
        mixed = self._read_parameters(bucket)
        received = {rank: torch.empty_like(mixed) for rank, _ in sources}
        self._context.group.exchange(
            [(rank, mixed) for rank, _ in targets], list(received.items()), tag=MESSAGE_TAG + index
        ).wait()
        mixed.mul_(1 - sum(weight for _, weight in sources))
        for rank, weight in sources:
            mixed.add_(received[rank], alpha=weight)

    def _mix_coded(self, index: int, sources: Neighbours, targets: Neighbours) -> None:
        bucket, coding = self._buckets[index], self._options.codec
        mixed = self._read_parameters(bucket).to(_mixing_dtype(bucket.flat.dtype), copy=True)
        sends, receives, started = [], [], time.thread_time()
        for rank, _ in targets:
            estimate = self._estimate_of(index, rank, own=True)
            buffer, message = make_message(coding, mixed.numel(), mixed.device)
            # Each direction of each pair draws its own random numbers.
            pair = self._context.group.rank * 256 + rank
            coding.encode(
                (mixed - estimate).float(),
                message,
                make_generator(self._steps, index, pair, mixed.device),
            )
            # The receiver adds the same message to its copy of this estimate.
            _add_message(coding, message, estimate)
            sends.append((rank, buffer))
            self._mixing.sent_bytes += buffer.nbytes
            self._mixing.exact_bytes.append(bucket.flat.nbytes)
            self._mixing.keep_samples(mixed, estimate)
        for rank, _ in sources:
            receives.append(
                (rank, torch.empty_like(make_message(coding, mixed.numel(), mixed.device)[0]))
            )
        self._mixing.coding_seconds += time.thread_time() - started
        self._context.group.exchange(sends, receives, tag=MESSAGE_TAG + index).wait()
        started = time.thread_time()
        for rank, buffer in receives:
            _add_message(
                coding,
                split_message(coding, mixed.numel(), buffer),
                self._estimate_of(index, rank, own=False),
            )
        for rank, weight in sources:
            mixed.add_(self._estimates[index, rank, False], alpha=self._options.gamma * weight)
        for rank, weight in targets:
            mixed.sub_(self._estimates[index, rank, True], alpha=self._options.gamma * weight)
        self._mixing.coding_seconds += time.thread_time() - started
        bucket.flat.copy_(mixed)

    def _estimate_of(self, index: int, rank: int, *, own: bool) -> Tensor:
        """Estimate of this replica on a neighbour (`own`), or of the neighbour's replica here.

        It begins as the values that all replicas had when they were last equal.
        """
        key = (index, rank, own)
        if key not in self._estimates:
            self._estimates[key] = self._common_values[index].clone()
        return self._estimates[key]

    def converge(self) -> None:
        """Set all replicas to their mean."""
        if self._are_equal:
            return
        self._context.agreement.repeat_until_settled(
            self._compute_means, what="the mean of replicas"
        )
        for bucket in self._buckets:
            self._write_parameters(bucket)
        self._forget_estimates()
        self._are_equal = True

    # ---- the rest of the life of a strategy

    def abort(self) -> None:
        self._grads.clear()
        self._step_open = False

    def join_info(self) -> Any:
        rate = None if self._account is None else self._account.rate
        return None if rate is None else list(rate)

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Let the next mixing set all replicas to their mean, as estimates don't fit any more."""
        self._context = context
        if not isinstance(self._graph, str):
            context.announce(
                "the graph was given as pairs of ranks, and the workers have changed: "
                "gossip goes on with graph='exponential'"
            )
            self._graph = "exponential"
        if self._account is not None and self._account.rate is None and layout is not None:
            self._account.rate = ExactRate(*layout)
        self._workers_changed, self._are_equal = True, False

    def load_from_peer(self, state: dict[str, Any]) -> None:
        self._steps = state["gossip"]

    def detach(self) -> None:
        self._buckets, self._estimates = [], {}

    def state_dict(self) -> dict[str, Any]:
        """Number of steps. Replicas must be equal."""
        return {"gossip": self._steps + self._step_open}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        saved = [state for state in states if state]
        check_strategy("Gossip", saved, "gossip")
        self._steps = saved[0]["gossip"] if saved else self._steps
        self._grads.clear()
        self._forget_estimates()
        self._are_equal = True


def _mixing_dtype(kind: torch.dtype) -> torch.dtype:
    """Dtype in which replicas of a dtype are mixed, so that small changes aren't rounded away."""
    return torch.promote_types(kind, torch.float32) if kind.is_floating_point else kind


def _add_message(coding: Coding, message: Message, estimate: Tensor) -> None:
    """Add a message to an estimate, with the same bits on both sides."""
    if estimate.dtype == torch.float32:
        coding.add(message, estimate)
        return
    decoded = torch.empty(estimate.shape, dtype=torch.float32, device=estimate.device)
    coding.decode(message, decoded)
    estimate.add_(decoded)
