"""State of the workers, for checkpoints that another library writes.

Such a library saves models, optimizers and loaders by itself. What it doesn't know of is collected
here, and restored: the state of the strategy (residuals of a codec, the round of a LocalSGD), the
random generators of each worker, and the number of steps. The entry holds plain values and tensors
only, so `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.session.run import Run, parts_of_run
from paceline.state.snapshot import copy_to_tensor, snapshot_from_bytes

ENTRY: Final = "paceline"  # key of a checkpoint


def collect_worker_states(run: Run) -> dict[str, Any]:
    """Make replicas equal, and bring the state of all workers to the first one. Collective.

    Models and optimizers are to be saved after this call. Inside the loop over a loader the present
    step counts as taken, as it does for the state of the loader.

    Returns:
        The entry for the checkpoint. On other workers than the first it has no states.
    """
    parts = parts_of_run(run)
    agreement, in_step = parts.axes.everyone, parts.loop.leading_turn is not None

    def collect() -> list[Tensor]:
        parts.own.abilities.converge()
        group, is_first = agreement.group, agreement.group.rank == 0
        body = copy_to_tensor(parts.own.pack_snapshot().to_bytes())
        lengths = agreement.meet("the state of workers", str(body.nbytes).encode())
        bodies = {
            rank: torch.empty(int(length), dtype=torch.uint8)
            for rank, length in enumerate(lengths)
            if is_first and rank
        }
        group.exchange([] if is_first else [(0, body)], list(bodies.items())).wait()
        return [body, *bodies.values()] if is_first else []

    return {
        "steps": parts.loop.steps_made + in_step,
        "workers": agreement.attempt_call(collect),
    }


def restore_worker_states(run: Run, entry: dict[str, Any] | None) -> None:
    """Restore what `collect_worker_states` gave, with any number of workers.

    All workers call it with the same entry, after models and optimizers have their state. None is
    for a checkpoint that was written without paceline: the strategy then begins anew.

    Raises:
        CheckpointError: The entry was written by another version of paceline.
    """
    if entry is None:
        return
    try:
        steps, workers = int(entry["steps"]), list(entry["workers"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"the entry {ENTRY!r} of this checkpoint can't be read ({error!r}): another version of "
            "paceline has written it; resume with that version"
        ) from error
    parts = parts_of_run(run)
    snapshots = [snapshot_from_bytes(body.numpy().tobytes()) for body in workers]
    parts.own.load_worker_states(run.rank, dict(enumerate(snapshots)))
    parts.resumption.continue_at_step(steps)
