"""Local SGD, DiLoCo, and streaming DiLoCo: workers step on their own, and agree every few steps.

    worker 0   step step step step |  mean of the changes of all     | step step step step |
    worker 1   step step step step |  workers in these four steps    | step step step step |

With fragments=2, delay=1 one fragment is exchanged at a time, while steps go on:

    fragment 0   s s s s[send]s[mix]s s s[send]s[mix]
    fragment 1   s s[send]s[mix]s s s[send]s[mix]s s

Changes are weighted by each worker's part of the samples. So `every=1` with plain SGD takes the
steps of AllReduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.bucket_layout import scale_copy
from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Slot, Sync, check_strategy
from paceline.sync.context import SyncContext, rescale_to_part
from paceline.sync.localsgd.fragment import adaptive
from paceline.sync.localsgd.options import RoundOptions
from paceline.sync.localsgd.rounds import Rounds


@dataclass(frozen=True)
class LocalSGD(RoundOptions):
    """Let each worker step on its own, and make replicas equal every few steps.

    >>> pl.start(sync=pl.LocalSGD(every=32, outer=pl.nesterov(0.7, 0.9), codec=pl.int8()))  # DiLoCo

    `p.grad` is the gradient of this worker's share, and `optimizer.step()` moves its own replica.
    Replicas also become equal before an evaluation, at `run.save`, and at the end of the run.

    Args:
        every: Steps between two exchanges, or `adaptive(...)`.
        outer: Optimizer that applies the mean change of a round: `average()` (local SGD, the
            default) or `nesterov(0.7, 0.9)` (DiLoCo, Douillard et al. 2023).
        codec: Encoding of the changes on the wire. Default: `exact()`.
        momentum: "kept" (default): each worker keeps its own optimizer state. "averaged": it is
            averaged together with the parameters.
        after: Steps of AllReduce before the first local step (post-local SGD, Lin et al. 2020).
            Default: 0.
        fragments: Parts of the model that are exchanged in turn (streaming DiLoCo, Douillard et al.
            2025). Default: 1.
        delay: Steps between sending a part and using its mean, fewer than `every`. Default: 0.
        alpha: Weight of the worker's own values when a mean comes in: x = alpha x + (1 - alpha)
            mean. Default: 0.
        bucket_mb: Size of a bucket in MB. Default: 8.
        quorum: Part of the running workers whose changes close a round, such as 0.8 (decoupled
            DiLoCo, arXiv 2604.21428). Workers then train at their own pace within an epoch: each
            sends its change after `every` steps of its own, and a late change is in the next round.
            A server beside the first worker keeps the rounds. Default: all workers, in lockstep.
        grace_seconds: With `quorum`: seconds for which a round waits for the other workers once it
            has its quorum. Default: 5.

    Raises:
        UsageError: A value is out of its range.
    """

    __repr__ = format_as_call

    def begin(self, context: SyncContext) -> Sync:
        if self.quorum is None:
            return self.begin_in_lockstep(context)
        if context.cut_axes or context.begin_quorum is None:
            raise UsageError(
                f"{self!r}: rounds with a quorum need whole models and workers that are started "
                "by a launcher; leave out quorum, or the cut"
            )
        sync: Sync = context.begin_quorum(context, self)
        return sync

    def begin_in_lockstep(self, context: SyncContext) -> LocalSGDSync:
        """Start rounds of all workers, which are in lockstep."""
        if context.cut_axes and isinstance(self.every, adaptive):
            raise UsageError(
                f"{self!r}: the drift between replicas differs from part to part of a cut model, "
                "and so would the length of rounds; give a number of steps"
            )
        return LocalSGDSync(context, self)


class LocalSGDSync:
    """The running side of `LocalSGD`.

    While `_warm_up` isn't None, the strategy is AllReduce, and the rounds have no units.
    """

    replicas_diverge = True  # replicas differ between rounds, and so do their optimizers

    def __init__(self, context: SyncContext, options: RoundOptions) -> None:
        self._context, self._options = context, options
        self._rounds = Rounds(context, options)
        self._warm_up = AllReduce().begin(context) if options.after else None
        self._grads: dict[int, Tensor] = {}  # by index of the slot
        self.has_sync_points = options.fragments == 1 and not options.alpha

    @property
    def exchanges_in_backward(self) -> bool:
        """Whether the strategy is still in its warm-up with AllReduce."""
        return self._warm_up is not None

    def attach(self, slots: Sequence[Slot]) -> None:
        self.converge()
        self._rounds.set_slots(slots)
        if self._warm_up is not None:
            self._warm_up.attach(slots)
        else:
            self._rounds.build_units()

    def detach(self) -> None:
        self._rounds.close()
        if self._warm_up is not None:
            self._warm_up.detach()

    # ---- a step: nothing travels in backward

    def take_gradient(self, index: int, grad: Tensor, scale: float) -> None:
        if self._warm_up is not None:
            self._warm_up.take_gradient(index, grad, scale)
            return
        state = self._context.step_state
        # If several workers share a replica, gradients are summed over them, with global weights.
        # `end_backward` turns the sums into means.
        value = scale_copy(
            grad, state.local_factor(grad, scale) if self._context.sharers is None else scale
        )
        self._grads[index] = self._grads[index] + value if index in self._grads else value

    def overwrites(self, index: int, grad: Tensor) -> bool:
        return self._warm_up is not None and self._warm_up.overwrites(index, grad)

    def end_backward(self, where: str) -> list[tuple[int, Tensor]]:
        self._rounds.open_step()
        if self._warm_up is not None:
            return self._warm_up.end_backward(where)
        gradients, self._grads = list(self._grads.items()), {}
        sample_part = self._context.sum_replica_share()
        self._rounds.set_sample_part(sample_part)
        if self._context.sharers is not None:
            rescale_to_part((gradient for _, gradient in gradients), sample_part)
        return gradients

    def note_optimizer_step(self, optimizer: Optimizer) -> None:
        self._rounds.note_optimizer_step()

    def commit(self) -> None:
        """End a step, and the rounds that are due with it."""
        if self._warm_up is None:
            self._rounds.end_step()
            return
        self._warm_up.commit()
        self._rounds.end_warm_up_step()
        if self._rounds.steps >= self._options.after:
            self._context.agreement.attempt_call(self._end_warm_up)

    def _end_warm_up(self) -> None:
        if self._warm_up is not None:
            self._warm_up.detach()
            self._warm_up = None
        # There are units already if a worker was lost during an earlier try of this call.
        if not self._rounds.units:
            self._rounds.build_units()

    def converge(self) -> None:
        """End all rounds now; the step under way is part of them."""
        if self._warm_up is None:
            self._rounds.converge()

    def replicated_state(self) -> dict[str, Tensor] | None:
        """Values of the last round, if all replicas are equal to them; else None.

        During the warm-up replicas are always equal, and the strategy has no state of its own.
        """
        return {} if self._warm_up is not None else self._rounds.values_if_equal()

    def abort(self) -> None:
        self._grads.clear()
        self._rounds.abort()
        if self._warm_up is not None:
            self._warm_up.abort()

    # ---- workers that leave and join

    def join_info(self) -> Any:
        warm = None if self._warm_up is None else self._warm_up.join_info()
        return {**self._rounds.join_info(), "warm": warm}

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Keep the values of the last round, and start unfinished exchanges again."""
        layout = self.join_info() if layout is None else layout
        self._context = context
        self._rounds.regroup(context, layout)
        if self._have_rounds_begun():
            self._warm_up = None
            self._rounds.rebuild_units()
        elif self._warm_up is not None:
            self._warm_up.regroup(context, layout["warm"])

    def _have_rounds_begun(self) -> bool:
        """Whether some worker has begun with rounds. Collective.

        Others may not have, if a worker was lost at the end of the warm-up.
        """
        return not self._options.after or any(
            self._context.group.gather_bytes(b"1" if self._rounds.units else b"")
        )

    def load_from_peer(self, state: dict[str, Any]) -> None:
        self._rounds.load_from_peer(state)

    @property
    def has_unreplicated_state(self) -> bool:
        return self._warm_up is None and bool(self._rounds.units)

    def unreplicated_state(self) -> dict[str, Any] | None:
        """This worker's changes since the last rounds, and the residuals of its codec."""
        return self._rounds.unreplicated_state() if self.has_unreplicated_state else None

    def load_unreplicated_state(self, state: dict[str, Any], step: int) -> bool:
        """Add a lost worker's changes to the rounds under way.

        Rounds that have ended after `step` have included them already.
        """
        return self._rounds.load_unreplicated_state(state, step)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """State of the outer optimizer and the codec. Replicas must be equal."""
        return self._rounds.state_dict()

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        saved = [state for state in states if state]
        check_strategy("LocalSGD", saved, "every")
        if saved:
            self._rounds.load_counts(saved[0])
            if self._warm_up is not None and self._rounds.steps >= self._options.after:
                self._end_warm_up()
        self._rounds.load_state_dicts(saved)
