"""Says what a script has joined, and at its first step what is missing: workers may train each for
itself.

first optimizer that steps     nothing prepared         loops over     its gradients
  is not the run's             said                     -              -
  is the run's                 -                        no loader, or not the prepared one: said
  was prepared                 -                        the same       none, and of no prepared
                                                        model: said
"""

from __future__ import annotations

import sys

from torch.optim import Optimizer

from paceline.comm.group import Traffic
from paceline.loop.turns import TrainingLoop
from paceline.prepare.registry import Prepared
from paceline.record.logged.metric import HOME
from paceline.workers.axes import RunAxes, describe

_PREPARE = "model, optimizer, loader = run.prepare(model, optimizer, loader)"


class StartupHints:
    """Says what `prepared` has, and what is missing with several workers; each thing once."""

    def __init__(self, prepared: Prepared, loop: TrainingLoop) -> None:
        self._prepared, self._loop = prepared, loop
        self._said: set[str] = set()
        self._introduced = False
        self._before = self._together()

    def begin(self) -> None:
        """Follow the script from here, until `ended`."""
        self._before = self._together()

    def introduce(self, axes: RunAxes, strategy: str) -> None:
        """Say in one line what was joined, once a loader tells the global batch."""
        loader = next(
            (loader for loader in self._prepared.loaders if loader.terms.train is not False), None
        )
        if not self._introduced and loader is not None:
            self._introduced = True
            batch = loader.terms.loader.batch_size
            shares = (
                None
                if batch is None
                else (batch,)
                if loader.terms.by_cost
                else loader.terms.shares(batch)
            )
            hosts, workers = axes.cluster(), axes.everyone.group.size
            grid = describe(axes.mesh, hosts) if axes.cut else ""
            self._prepared.context.announce(
                introduction(workers, len(hosts.hosts), strategy, shares, grid)
            )

    # ---- an optimizer's first step

    def strange(self, optimizer: Optimizer, ours: bool) -> None:
        """Hint at an optimizer that steps and wasn't prepared.

        `ours`: it has parameters of the run.
        """
        if ours:
            self.ours()
        elif not (self._prepared.models or self._prepared.optimizers):
            self._nothing()
        else:
            self._say(
                f"the {type(optimizer).__qualname__} steps on parameters that were not given to "
                f"run.prepare: each of the {self._size} "
                "workers trains them for itself; unless that is meant, give their model and it to "
                "run.prepare"
            )

    def ours(self) -> None:
        """Hint at loaders, as an optimizer steps on prepared parameters."""
        training = [loader for loader in self._prepared.loaders if loader.terms.train is not False]
        count = (
            f"each of the {self._size} workers takes batches of its own, whole, and counts as "
            f"1/{self._size} of a step"
        )
        if not training:
            self._say(
                f"no loader was given to run.prepare: {count}; write {_PREPARE}, or see that they "
                "take different samples"
            )
        elif self._loop.turn is None and not self._loop.steps:
            self._say(
                f"an optimizer steps outside of a loop over the prepared loader: {count}; "
                f"loop over what run.prepare gives back: {_PREPARE}"
            )
        if self._prepared.survives and HOME in sys.modules:
            self._say(
                f"with --min-workers torch.distributed has no default process group, so {HOME} "
                "sees one worker alone: use run.mean and "
                "run.gather"
            )

    def prepared(self, optimizer: Optimizer) -> None:
        """Hint at parameters without gradients, as a prepared optimizer steps."""
        self.ours()
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        models = {id(p) for _, model in self._prepared.models for p in model.parameters()}
        if models and not any(p.grad is not None or id(p) in models for p in mine):
            self._say(
                f"the {type(optimizer).__qualname__} steps, and trains nothing: "
                f"none of its {len(mine)} parameters has a gradient, or is "
                "in a model that was given to run.prepare; make it with the parameters of that "
                "model"
            )

    # ---- elsewhere

    def had_ghosts(self) -> None:
        """Hint at metrics, as some workers had no samples in a step."""
        if HOME in sys.modules and not self._prepared.metrics:
            self._say(
                "some batches have fewer samples than there are workers, who get the first sample "
                f"once more (a ghost), and {HOME} is in "
                "use: a metric that is given batches of training counts that sample twice, unless "
                "it was given to run.prepare"
            )

    def added_up(self) -> None:
        """Hint at sums that a script has made over a loop in which some workers had no samples."""
        self._say(
            "run.sum after a loop in which some workers had no samples, and ran on the batch's "
            "first "
            "one (a ghost): if the script added x up in that loop, call run.sum in it instead, or "
            "add "
            "x * (run.weight > 0), so that ghosts don't count"
        )

    def logged(self) -> None:
        """Hint at loaders, as the script logs numbers without one."""
        if not (self._prepared.models or self._prepared.optimizers):
            self._nothing()
        self._say(
            "run.log writes a line for each turn of a loader that was given to run.prepare, and "
            "there is none: all is one line"
        )

    def ended(self) -> None:
        """Hint at a script that gave nothing to run.prepare, as an epoch or the run has ended."""
        prepared = self._prepared
        if (
            not (prepared.models or prepared.optimizers or prepared.loaders)
            and self._together() == self._before
        ):
            self._nothing()

    def _together(self) -> tuple[int, Traffic]:
        """Return counts of what workers have called and sent together."""
        context = self._prepared.context
        return context.agreement.calls, context.traffic

    def _nothing(self) -> None:
        loader = "but a loader " if self._prepared.loaders else ""
        self._say(
            f"nothing {loader}was given to run.prepare: if this script trains, each of the "
            f"{self._size} workers does it for itself; "
            f"write {_PREPARE}"
        )

    @property
    def _size(self) -> int:
        return self._prepared.context.group.size

    def _say(self, text: str) -> None:
        if self._size > 1 and text not in self._said:
            self._said.add(text)
            self._prepared.context.announce(text)


def introduction(
    workers: int, hosts: int, strategy: str, shares: tuple[int, ...] | None, mesh: str = ""
) -> str:
    """Say in one line what was joined.

    `shares` are those of a usual batch; `mesh` says how workers are dealt to it, if to one.
    """
    batch = ""
    if shares is not None:
        cut = (
            f"{len(shares)} x {shares[0]}"
            if len(set(shares)) == 1
            else " + ".join(map(str, shares))
        )
        batch = f", global batch {sum(shares)}" + (f" = {cut}" if len(shares) > 1 else "")
    grid = f", {mesh}" if mesh else ""
    return (
        f"{workers} worker{'s' if workers > 1 else ''} on {hosts} "
        f"host{'s' if hosts > 1 else ''}{grid}, {strategy}{batch}"
    )
