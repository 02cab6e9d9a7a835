"""The order in which parts of a run are told of what happens in its training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.loader import ShareLoader

ModelStepped = Callable[[nn.Module, tuple[Any, ...], Callable[..., Tensor]], None]
StepEnded = Callable[[int, int, Mapping[str, float]], None]


@dataclass(frozen=True)
class LoopObservers:
    """Functions that are called at each moment of the loop, one after another.

    The moments are listed in the order in which a run comes to them.
    """

    # an epoch of training is about to begin, or a loop over epochs
    training_begins: tuple[Callable[[], None], ...] = ()
    epoch_began: tuple[Callable[[], None], ...] = ()  # of training, on all workers
    # the turns of this loader are the steps from now on
    lead_taken: tuple[Callable[[ShareLoader], None], ...] = ()
    # run.step is called: the model, if this worker has all of its layers; the arguments and the
    # target; the function of them to minimise
    model_stepped: tuple[ModelStepped, ...] = ()
    # a prepared optimizer steps for the first time
    first_step: tuple[Callable[[Optimizer], None], ...] = ()
    stepped: tuple[Callable[[Optimizer], None], ...] = ()  # an optimizer has stepped
    # optimizers have stepped once, twice, four times, eight times and so on
    doubled: tuple[Callable[[], None], ...] = ()
    # this step counts; what follows is done in its time
    committed: tuple[Callable[[int], None], ...] = ()
    # the turn under way has failed, and will be dealt again
    turn_failed: tuple[Callable[[], None], ...] = ()
    # the number of the step, the samples of it, and where its time went
    step_ended: tuple[StepEnded, ...] = ()
    # some worker had no samples in the step that ended
    ghost_ended: tuple[Callable[[], None], ...] = ()
    went_back: tuple[Callable[[int], None], ...] = ()  # steps after this one were none

    def preceded_by(self, first: LoopObservers) -> LoopObservers:
        """Make observers that call those of `first` at each moment, and then these."""
        names = [moment.name for moment in fields(self)]
        return LoopObservers(**{name: getattr(first, name) + getattr(self, name) for name in names})

    def describe_order(self) -> Iterator[str]:
        """Yield each moment with what is called at it, in order."""
        for moment in fields(self):
            if observers := getattr(self, moment.name):
                yield (
                    f"{moment.name}: "
                    f"{', '.join(each.__qualname__.rpartition('<locals>.')[2] for each in observers)}"  # noqa: E501
                )
