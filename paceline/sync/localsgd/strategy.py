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

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.sync.context import SyncContext
from paceline.sync.localsgd.fragment import adaptive
from paceline.sync.localsgd.options import RoundOptions
from paceline.sync.localsgd.rounds import LocalSGDSync


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

    Raises:
        UsageError: A value is out of its range.
    """

    __repr__ = format_as_call

    def begin(self, context: SyncContext) -> LocalSGDSync:
        if context.cut_axes and isinstance(self.every, adaptive):
            raise UsageError(
                f"{self!r}: the drift between replicas differs from part to part of a cut model, "
                "and so would the length of rounds; give a number of steps"
            )
        return LocalSGDSync(context, self)
