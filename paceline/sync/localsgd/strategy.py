"""Local SGD, DiLoCo, and streaming DiLoCo: workers step by themselves, and agree every so many steps on where they are.

    worker 0   step step step step |  mean of what each has changed  | step step step step |
    worker 1   step step step step |  since they last agreed         | step step step step |

    fragments=2, delay=1   fragment 0   s s s s[send]s[mix]s s s[send]s[mix]        one fragment at a time, while steps go on
                           fragment 1   s s[send]s[mix]s s s[send]s[mix]s s

What a worker has changed counts by its part of the samples, so that `every=1` with plain SGD is AllReduce.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.codec.auto import auto
from paceline.codec.codec import Codec, lift
from paceline.codec.coding import Coding, exact
from paceline.errors import UsageError
from paceline.formatting import choices, spell
from paceline.sync.context import SyncContext
from paceline.sync.localsgd.fragment import adaptive
from paceline.sync.localsgd.outer import Outer, average
from paceline.sync.localsgd.rounds import LocalSGDSync

Momentum = Literal["kept", "averaged"]
MOMENTA: tuple[Momentum, ...] = ("kept", "averaged")


@dataclass(frozen=True)
class LocalSGD:
    """p.grad is the gradient of my own share and step moves my own replica; every `every` steps replicas become equal again.

    `outer`: `average()` (local SGD) or `nesterov(0.7, 0.9)` (DiLoCo). `codec`: how the changes travel. `every` may be `adaptive(...)`.
    `momentum`: what the optimizers remember of each parameter is "kept" by each worker, or "averaged" with it. `after`: AllReduce for so
    many steps first (post-local SGD, Lin et al. 2020). `fragments`, `delay`, `alpha` (streaming DiLoCo, Douillard et al. 2025): the model
    is cut into so many parts that take turns; a part's mean is used `delay` steps after it was sent, mixed with what the worker has then:
    x = alpha x + (1 - alpha) mean.

    Replicas also become equal where they are looked at as one: before an evaluation, at `run.save`, and at the end of the run.
    """

    every: int | adaptive
    outer: Outer = field(default_factory=average)
    codec: Codec | Coding = field(default_factory=exact)
    momentum: Momentum = "kept"
    after: int = 0
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    bucket_mb: float = 8.0

    __repr__ = spell

    def __post_init__(self) -> None:
        if isinstance(self.codec, auto):
            raise UsageError(f"{self.codec!r} measures steps of AllReduce; give LocalSGD a codec, such as int8()")
        lift(self.codec)
        steps = self.every.least if isinstance(self.every, adaptive) else self.every
        if not isinstance(self.every, int | adaptive) or steps < 1:
            raise UsageError(f"every={self.every!r} is not a number of steps; give 1 or more, or adaptive(...)")
        if self.momentum not in MOMENTA:
            raise UsageError(f"momentum={self.momentum!r} is unknown; {choices(str(self.momentum), MOMENTA)}")
        if not hasattr(self.outer, "move"):
            raise UsageError(f"outer={self.outer!r} is no outer optimizer; there are average() and nesterov(0.7, 0.9)")
        if self.after < 0 or self.fragments < 1 or not 0 <= self.alpha < 1 or not self.bucket_mb > 0:
            raise UsageError(f"{self!r}: after has to be 0 or more, fragments 1 or more, alpha from 0 to below 1, bucket_mb above 0")
        if not 0 <= self.delay < steps:
            raise UsageError(f"{self!r}: delay has to be 0 or more, and less than the {steps} steps of a round")
        if self.alpha and not self.delay:
            raise UsageError(f"{self!r}: alpha mixes what is late; give delay too, or leave alpha out")

    def begin(self, context: SyncContext) -> LocalSGDSync:
        return LocalSGDSync(context, self)
