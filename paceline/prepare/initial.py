"""First values of models that are prepared: from `run.prepare(init=...)`, or from their modules.

The modules of a model that was built without memory give its values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm.agreement import Agreement, act_together
from paceline.errors import UsageError
from paceline.parallel.initialise import Blueprint, has_meta_parameters
from paceline.parallel.placement import Placements
from paceline.parallel.weights import Weights, load_weights
from paceline.prepare.stored import Source, open_weights

Init = Callable[[nn.Module], Any] | Source


def check_init(init: Init | None, models: Sequence[nn.Module], fresh: Sequence[nn.Module]) -> None:
    """Raise `UsageError` if a call gives `init` for models that were prepared before.

    Args:
        init: The option of the call.
        models: The models of the call.
        fresh: Those models that were not prepared before.
    """
    if init is not None and models and not fresh:
        raise UsageError(
            "init= is for models that are prepared for the first time, and these were prepared "
            "before: give it to the first call"
        )


def move_models(models: Sequence[nn.Module], device: torch.device) -> None:
    """Move models to a GPU; parameters without memory get theirs there."""
    for model in models if device.type == "cuda" else ():
        if not has_meta_parameters(model):
            model.to(device)
            continue
        # `Module.to` fails for parameters without memory, so only the buffers are moved, in
        # torch's private dict of buffers by name. If it goes, this raises an AttributeError.
        for module in model.modules():
            module._buffers.update(
                (name, buffer.to(device))
                for name, buffer in module._buffers.items()
                if buffer is not None
            )


class InitialValues:
    """First values of models that are prepared together.

    Make it before the models are cut, and call `give_values` after that.

    Args:
        models: The models, each with the prefix of its names.
        init: The option of `run.prepare`. None: modules give the values.
        seed: Seed of the values.
        device: Where parameters without memory get their memory.

    Raises:
        UsageError: `init` doesn't fit the models.
    """

    def __init__(
        self,
        models: Sequence[tuple[str, nn.Module]],
        init: Init | None,
        seed: int,
        device: torch.device,
    ) -> None:
        init = init if models else None
        self._seed, self.device = seed, device
        self._source: Source | None = None if init is None or callable(init) else init
        unborn = [(prefix, model) for prefix, model in models if has_meta_parameters(model)]
        if callable(init) and not unborn:
            raise UsageError(
                "init=function gives values to models that were built under pl.meta(), and these "
                "have values already: build them under pl.meta(), or give a file or a state dict, "
                "init='model.safetensors'"
            )
        if self._source is not None and len(models) != 1:
            raise UsageError(
                f"init= has weights of one model, and this call prepares {len(models)} models: "
                "prepare each model in a call of its own"
            )
        self._models = list(models)
        # A blueprint has to see the model before it is cut.
        self._blueprints = (
            []
            if self._source is not None
            else [(model, Blueprint(model, init, prefix=prefix)) for prefix, model in unborn]  # type: ignore[arg-type]
        )

    def give_values(
        self, placements: Placements, agreement: Agreement, say: Callable[[str], None]
    ) -> None:
        """Give each worker its part of the values.

        Collective if weights are read. If one worker can't read them, all raise.

        Args:
            placements: Which part of each parameter this worker holds.
            agreement: Agreement of all workers.
            say: Called with a message if an older checkpoint replaces one that can't be used.
        """
        for model, blueprint in self._blueprints:
            blueprint.make_parameters(model, placements, self._seed, self.device)
        if self._source is not None:
            self._read_value(self._source, placements, agreement, say)
        move_models([model for _, model in self._models], self.device)

    def _read_value(
        self,
        source: Source,
        placements: Placements,
        agreement: Agreement,
        say: Callable[[str], None],
    ) -> None:
        (prefix, model), opened = self._models[0], list[Weights]()

        def begin() -> bytes:
            opened.append(files.enter_context(open_weights(source, say)))
            return opened[0].digest.encode()

        def read() -> bytes:
            load_weights(model, opened[0], placements, prefix=prefix, device=self.device)
            return b""

        # First all open their weights, then all compare them, then all read. So a worker that can't
        # open them says so before any parameter has changed.
        with contextlib.ExitStack() as files:
            digests = act_together(agreement, "weights of prepare", begin, UsageError)
            other = next(
                (rank for rank, digest in enumerate(digests) if digest != digests[0]), None
            )
            if other is not None:
                raise UsageError(
                    f"ranks 0 and {other} were given different weights by init=; "
                    "give all workers the same file or dict"
                )
            act_together(agreement, "parts of the weights of prepare", read, UsageError)
