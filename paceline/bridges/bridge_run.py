"""The run beneath a strategy of another library: opened once, when that library wants processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from paceline.cluster.discover import discover_place
from paceline.errors import UsageError
from paceline.loop.turns import TrainingLoop
from paceline.prepare.hooks import ForwardHook
from paceline.session.run import Run, parts_of_run
from paceline.session.start import start

# options of run.prepare that a strategy takes; all others go to pl.start
PREPARED: Final = ("shares", "loss", "weigh", "cost", "batchnorm", "shard", "pad")


class BridgeRun:
    """A run that a foreign strategy opens and uses.

    Args:
        library: Name of the library, for messages.
        options: Options of `pl.start`, and those of `run.prepare` in `PREPARED`, by name.

    Raises:
        UsageError: An option can't be honoured under this library.
    """

    def __init__(self, library: str, options: Mapping[str, Any]) -> None:
        self.library, self.place = library, discover_place()
        refused = sorted({"mesh", "cut", "init", "device"} & set(options))
        if refused or self.place.mesh or self.place.cut:
            what = refused[0] if refused else "--mesh" if self.place.mesh else "--cut"
            reason = (
                "the accelerator chooses the device"
                if what == "device"
                else "models that are cut are trained in a loop of paceline's own (docs/cuts.md)"
            )
            raise UsageError(f"{what} can't be honoured under {library}: {reason}")
        if self.place.joining:
            raise UsageError(
                f"a worker can't join in the middle of a run of {library}, whose loop has begun: "
                "start with --min-workers and without --restarts"
            )
        self._prepared = {name: options[name] for name in PREPARED if name in options}
        self._started = {name: options[name] for name in options if name not in PREPARED}
        self._run: Run | None = None

    @property
    def is_open(self) -> bool:
        """Whether the run has been opened."""
        return self._run is not None

    @property
    def run(self) -> Run:
        """The run. Raises `UsageError` before it is opened."""
        if self._run is None:
            raise UsageError(
                f"the run isn't open yet: {self.library} opens it when it launches its processes"
            )
        return self._run

    @property
    def loop(self) -> TrainingLoop:
        """The training loop of the run."""
        return parts_of_run(self.run).loop

    @property
    def device(self) -> torch.device | None:
        """Device of this worker; None before the run is open."""
        return None if self._run is None else self._run.device

    @property
    def survives(self) -> bool:
        """Whether the run goes on when workers are lost (`--min-workers`)."""
        return self.place.worker is not None

    @property
    def has_local_batchnorm(self) -> bool:
        """Whether BatchNorm layers are asked to keep the statistics of their own worker."""
        return self._prepared.get("batchnorm") == "local"

    def open(self, device: str | None) -> Run:
        """Open the run, unless it is open. Collective.

        Args:
            device: As for `pl.start`.
        """
        if self._run is None:
            run = start(device=device, **self._started)
            if parts_of_run(run).loop.abilities.remote is not None:
                raise UsageError(
                    f"ParameterServer keeps optimizers on servers, where {self.library} can't save "
                    "them: use another strategy, or a loop of paceline's own"
                )
            # Lightning has torchmetrics in memory for purposes of its own
            parts_of_run(run).hints.expect_metrics()
            self._run = run
        return self._run

    def close(self) -> None:
        """Close the run, together with all workers; the next `open` opens another one."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepare objects as `run.prepare` does, with the options of this strategy.

        Args:
            objects: As for `run.prepare`.
            options: Options that replace those of the strategy.

        Raises:
            UsageError: A model is part of another open run.
        """
        for model in objects:
            if isinstance(model, nn.Module) and self._belongs_elsewhere(model):
                raise UsageError(
                    f"this {type(model).__qualname__} is part of another run that is still open, "
                    "so its gradients would be exchanged twice: use one Fabric or Trainer for it, "
                    "or close the other's run first (strategy.close())"
                )
        return self.run.prepare(*objects, **{**self._prepared, **options})

    def _belongs_elsewhere(self, model: nn.Module) -> bool:
        # `_forward_pre_hooks` is private to torch's nn.Module, a dict of hooks by id. If it goes,
        # this raises an AttributeError.
        return any(
            isinstance(hook, ForwardHook) and not hook.belongs_to(self.loop)
            for hook in model._forward_pre_hooks.values()
        )
