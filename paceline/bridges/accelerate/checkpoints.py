"""Writes and loads what `save_state` saves: a checkpoint of the run, and weights for other tools.

output_dir/checkpoints/...        all state: models, optimizers, schedulers, positions of loaders,
                                  registered objects, random generators, the strategy
output_dir/model.safetensors      weights of the first model (model_1.safetensors, ...)
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import save
from accelerate.utils.other import clean_state_dict_for_safetensors

from paceline.checkpoint.saving import SaveRequest
from paceline.errors import CheckpointError, UsageError
from paceline.session.run import parts_of_run

NO_HOOKS = (
    "hooks of save_state and load_state change the files of Accelerate, and the state is in a "
    "checkpoint of paceline here: use register_for_checkpointing for objects of your own"
)


class LoopCount:
    """Accelerate's count of batches, by which it knows when a step is due.

    Args:
        accelerator: The `PacelineAccelerator`.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        """The count."""
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from this count."""
        self._accelerator.go_to_batch(state["step"])


def save_state(
    accelerator: Any,
    output_dir: str | None,
    *,
    safe_serialization: bool,
    options: Mapping[str, Any],
) -> str:
    """Write a checkpoint into a folder, or into the next one of the project. Collective."""
    if options:
        raise UsageError(
            f"save_state got {', '.join(options)}, which is for DeepSpeed: leave it out"
        )
    folder = _choose_folder(accelerator, output_dir)
    run, parts = accelerator.run, parts_of_run(accelerator.run)
    step = run.steps + (parts.loop.leading_turn is not None)
    parts.saving.save(SaveRequest(folder / "checkpoints", step, keep=1, background=False))
    if run.is_first:
        _save_weights(accelerator, folder, safe_serialization=safe_serialization)
    run.barrier()
    accelerator.project_configuration.iteration += 1
    return str(folder)


def _choose_folder(accelerator: Any, output_dir: str | None) -> Path:
    config = accelerator.project_configuration
    if not config.automatic_checkpoint_naming:
        if output_dir is None:
            raise UsageError("save_state needs a folder: save_state('checkpoint')")
        return Path(output_dir)
    parent = Path(accelerator.project_dir) / "checkpoints"
    folder = parent / f"checkpoint_{accelerator.save_iteration}"
    accelerator.run.barrier()
    if folder.exists():
        raise UsageError(
            f"{folder} is there already: set project_configuration.iteration to a new number"
        )
    # All processes have looked before the first one removes and writes.
    accelerator.run.barrier()
    if accelerator.run.is_first and config.total_limit is not None and parent.is_dir():
        numbered = _list_numbered(parent)
        for old in numbered[: max(0, len(numbered) + 1 - config.total_limit)]:
            shutil.rmtree(old)
    return folder


def _list_numbered(parent: Path) -> list[Path]:
    """List automatically named checkpoints, oldest first."""
    numbered = [path for path in parent.iterdir() if re.fullmatch(r"checkpoint_\d+", path.name)]
    return sorted(numbered, key=lambda path: int(path.name.rpartition("_")[2]))


def _save_weights(accelerator: Any, folder: Path, *, safe_serialization: bool) -> None:
    for number, model in enumerate(accelerator._models):
        ending = f"_{number}" if number else ""
        state = accelerator.unwrap_model(model).state_dict()
        if safe_serialization:
            state = clean_state_dict_for_safetensors(state)
        name = f"model{ending}.safetensors" if safe_serialization else f"pytorch_model{ending}.bin"
        save(state, str(folder / name), safe_serialization=safe_serialization)


def load_state(accelerator: Any, input_dir: str | None, options: Mapping[str, Any]) -> None:
    """Load a checkpoint from a folder, or the newest of the project. Collective."""
    if options:
        raise UsageError(
            f"load_state got {', '.join(options)}, which is for files of Accelerate: leave it out"
        )
    if input_dir is not None:
        folder = Path(input_dir)
    elif accelerator.project_configuration.automatic_checkpoint_naming:
        parent = Path(accelerator.project_dir) / "checkpoints"
        numbered = _list_numbered(parent) if parent.is_dir() else []
        if not numbered:
            raise CheckpointError(f"there is no checkpoint in {parent}")
        folder = numbered[-1]
    else:
        raise UsageError("load_state needs a folder: load_state('checkpoint')")
    if not parts_of_run(accelerator.run).resumption.resume_newest(folder):
        raise CheckpointError(
            f"{folder} has no checkpoint of paceline: those of accelerate.Accelerator can't be "
            "loaded, as they don't have all state; load its model.safetensors into the model"
        )
