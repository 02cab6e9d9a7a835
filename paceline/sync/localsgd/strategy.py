"""Local SGD, DiLoCo, and streaming DiLoCo: workers step by themselves, and agree every so many steps on where they are.

    worker 0   step step step step |  mean of what each has changed  | step step step step |
    worker 1   step step step step |  since they last agreed         | step step step step |

    fragments=2, delay=1   fragment 0   s s s s[send]s[mix]s s s[send]s[mix]        one fragment at a time, while steps go on
                           fragment 1   s s[send]s[mix]s s s[send]s[mix]s s

What a worker has changed counts by its part of the samples, so that `every=1` with plain SGD is AllReduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.formatting import spell
from paceline.sync.context import SyncContext
from paceline.sync.localsgd.fragment import adaptive
from paceline.sync.localsgd.options import RoundOptions
from paceline.sync.localsgd.rounds import LocalSGDSync


@dataclass(frozen=True)
class LocalSGD(RoundOptions):
    """p.grad is the gradient of my own share and step moves my own replica; every `every` steps replicas become equal again.

    >>> pl.start(sync=pl.LocalSGD(every=32, outer=pl.nesterov(0.7, 0.9), codec=pl.int8()))  # DiLoCo

    `outer`: `average()` (local SGD) or `nesterov(0.7, 0.9)` (DiLoCo). `codec`: how the changes travel. `every` may be `adaptive(...)`.
    `momentum`: what the optimizers remember of each parameter is "kept" by each worker, or "averaged" with it. `after`: AllReduce for so
    many steps first (post-local SGD, Lin et al. 2020). `fragments`, `delay`, `alpha` (streaming DiLoCo, Douillard et al. 2025): the model
    is cut into so many parts that take turns; a part's mean is used `delay` steps after it was sent, mixed with what the worker has then:
    x = alpha x + (1 - alpha) mean.

    Replicas also become equal before an evaluation, at `run.save`, and at the end of the run.
    """

    __repr__ = spell

    def begin(self, context: SyncContext) -> LocalSGDSync:
        if context.cut_axes and isinstance(self.every, adaptive):
            raise UsageError(
                f"{self!r}: rounds adapt to how far replicas drift apart, and each part of a cut model would find another length; "
                "give a number of steps"
            )
        return LocalSGDSync(context, self)
