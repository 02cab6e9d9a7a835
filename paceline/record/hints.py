"""Says what a script has joined, and hints at common mistakes: workers may train separately.

first optimizer that steps   nothing prepared   no loop over the      no gradients, and not
                                                prepared loader       of a prepared model
  not of the run             hint               -                     -
  has prepared parameters    -                  hint                  -
  was prepared               -                  hint                  hint
"""

from __future__ import annotations

import sys

from torch.optim import Optimizer

from paceline.comm.group_protocol import Traffic
from paceline.loop.turns import TrainingLoop
from paceline.prepare.registry import Prepared
from paceline.record.logged.metric import TORCHMETRICS
from paceline.workers.axes import RunAxes, describe_mesh

_PREPARE = "model, optimizer, loader = run.prepare(model, optimizer, loader)"


class StartupHints:
    """Announces what was joined, and what is missing in a script with several workers.

    Each hint is given once, on the first worker.
    """

    def __init__(self, prepared: Prepared, loop: TrainingLoop) -> None:
        self._prepared, self._loop = prepared, loop
        self._given_hints: set[str] = set()
        self._has_introduced = False
        self._expects_metrics = False
        self._counts_at_begin = self._count_collectives()

    def begin_watching(self) -> None:
        """Watch the script from here, until `end_watching`."""
        self._counts_at_begin = self._count_collectives()

    def introduce_run(self, axes: RunAxes, strategy: str) -> None:
        """Announce in one line what was joined, once a loader tells the global batch."""
        loader = next(
            (loader for loader in self._prepared.loaders if loader.terms.train is not False), None
        )
        if not self._has_introduced and loader is not None:
            self._has_introduced = True
            batch = loader.terms.loader.batch_size
            shares = (
                None
                if batch is None
                else (batch,)
                if loader.terms.deals_by_cost
                else loader.terms.shares(batch)
            )
            hosts, workers = axes.cluster(), axes.everyone.group.size
            grid = describe_mesh(axes.mesh, hosts) if axes.cut_axes else ""
            self._prepared.context.announce(
                describe_start(workers, len(hosts.hosts), strategy, shares, grid)
            )

    # ---- an optimizer's first step

    def hint_at_foreign_optimizer(self, optimizer: Optimizer, ours: bool) -> None:
        """Hint at an optimizer that steps and wasn't prepared.

        `ours` says whether it has parameters of the run.
        """
        if ours:
            self.hint_at_missing_loader()
        elif not (self._prepared.models or self._prepared.optimizers):
            self._hint_at_nothing_prepared()
        else:
            self._say_once(
                f"the {type(optimizer).__qualname__} steps on parameters that were not given to "
                f"run.prepare: each of the {self._world_size} "
                "workers trains them for itself; unless that is meant, "
                "give their model and it to run.prepare"
            )

    def hint_at_missing_loader(self) -> None:
        """Hint at a missing or unused loader, when an optimizer steps on prepared parameters."""
        training = [loader for loader in self._prepared.loaders if loader.terms.train is not False]
        count = (
            f"each of the {self._world_size} workers takes batches of its own, "
            f"whole, and counts as 1/{self._world_size} of a step"
        )
        if not training:
            self._say_once(
                f"no loader was given to run.prepare: {count}; write {_PREPARE}, or see that they "
                "take different samples"
            )
        elif self._loop.turn is None and not self._loop.steps_made:
            self._say_once(
                f"an optimizer steps outside of a loop over the prepared loader: {count}; "
                f"loop over what run.prepare gives back: {_PREPARE}"
            )
        # torchmetrics synchronises over the default process group, which a run that survives losses
        # does not have.
        if self._prepared.survives and TORCHMETRICS in sys.modules:
            self._say_once(
                "with --min-workers torch.distributed has no default process group, so "
                f"{TORCHMETRICS} sees one worker alone: use run.mean and run.gather"
            )

    def hint_at_missing_gradients(self, optimizer: Optimizer) -> None:
        """Hint at parameters without gradients, when a prepared optimizer steps."""
        self.hint_at_missing_loader()
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        model_parameters = {
            id(parameter) for _, model in self._prepared.models for parameter in model.parameters()
        }
        if model_parameters and not any(
            parameter.grad is not None or id(parameter) in model_parameters
            for parameter in parameters
        ):
            self._say_once(
                f"the {type(optimizer).__qualname__} steps, and trains nothing: none of its "
                f"{len(parameters)} parameters has a gradient, or is in a model that was given to "
                "run.prepare; make it with the parameters of that model"
            )

    # ---- elsewhere

    def expect_metrics(self) -> None:
        """Take it that metrics are in use by a library that prepares them, and don't hint at it."""
        self._expects_metrics = True

    def hint_at_ghost_metrics(self) -> None:
        """Hint at metrics that count ghosts, when some workers had no samples in a step."""
        expected = self._expects_metrics or bool(self._prepared.metrics)
        if TORCHMETRICS in sys.modules and not expected:
            self._say_once(
                "some batches have fewer samples than there are workers, who get the first sample "
                f"once more (a ghost), and {TORCHMETRICS} is in "
                "use: a metric that is given batches of training counts that sample twice, unless "
                "it was given to run.prepare"
            )

    def hint_at_ghost_sums(self) -> None:
        """Hint at sums over a loop in which some workers had no samples."""
        self._say_once(
            "run.sum after a loop in which some workers had no samples, "
            "and ran on the batch's first one (a ghost): if the script added x up in that loop, "
            "call run.sum in it instead, or add x * (run.weight > 0), so that ghosts don't count"
        )

    def hint_at_missing_turns(self) -> None:
        """Hint at a missing loader, when the script logs numbers without one."""
        if not (self._prepared.models or self._prepared.optimizers):
            self._hint_at_nothing_prepared()
        self._say_once(
            "run.log writes a line for each turn of a loader that was given to run.prepare, and "
            "there is none: all is one line"
        )

    def end_watching(self) -> None:
        """Hint at a script that gave nothing to run.prepare, when an epoch or the run has ended."""
        # A script that has called or sent something itself is distributed on purpose.
        prepared = self._prepared
        if (
            not (prepared.models or prepared.optimizers or prepared.loaders)
            and self._count_collectives() == self._counts_at_begin
        ):
            self._hint_at_nothing_prepared()

    def _count_collectives(self) -> tuple[int, Traffic]:
        """Return the number of collective calls, and the bytes sent."""
        context = self._prepared.context
        return context.agreement.calls, context.traffic

    def _hint_at_nothing_prepared(self) -> None:
        """Hint at a script that gave nothing but perhaps a loader to run.prepare."""
        loader = "but a loader " if self._prepared.loaders else ""
        self._say_once(
            f"nothing {loader}was given to run.prepare: if this script trains, each of the "
            f"{self._world_size} workers does it for itself; write {_PREPARE}"
        )

    @property
    def _world_size(self) -> int:
        """Number of workers."""
        return self._prepared.context.group.size

    def _say_once(self, text: str) -> None:
        """Announce a hint once, if there are several workers."""
        if self._world_size > 1 and text not in self._given_hints:
            self._given_hints.add(text)
            self._prepared.context.announce(text)


def describe_start(
    workers: int, hosts: int, strategy: str, shares: tuple[int, ...] | None, mesh: str = ""
) -> str:
    """Describe in one line what was joined.

    Args:
        workers: Number of workers.
        hosts: Number of hosts.
        strategy: Strategy, as text.
        shares: Samples of each worker in a usual batch; None if they aren't known.
        mesh: How workers are placed on the mesh, if there is one.
    """
    batch = ""
    if shares is not None:
        terms = (
            f"{len(shares)} x {shares[0]}"
            if len(set(shares)) == 1
            else " + ".join(map(str, shares))
        )
        batch = f", global batch {sum(shares)}" + (f" = {terms}" if len(shares) > 1 else "")
    grid = f", {mesh}" if mesh else ""
    return (
        f"{workers} worker{'s' if workers > 1 else ''} on {hosts} "
        f"host{'s' if hosts > 1 else ''}{grid}, {strategy}{batch}"
    )
