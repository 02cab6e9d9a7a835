"""The order in which parts of a run are told of what happens in its training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

from torch.optim import Optimizer

from paceline.data.loader import ShareLoader

StepEnded = Callable[[int, int, Mapping[str, float]], None]


@dataclass(frozen=True)
class LoopObservers:
    """What is called at each moment of the loop, one after another; moments are listed in the order in which a run comes to them."""

    training_begins: tuple[Callable[[], None], ...] = ()  # an epoch of training is about to begin, or a loop over epochs
    epoch_began: tuple[Callable[[], None], ...] = ()  # of training, on all workers
    lead_taken: tuple[Callable[[ShareLoader], None], ...] = ()  # the turns of this loader are the steps from now on
    first_step: tuple[Callable[[Optimizer], None], ...] = ()  # a prepared optimizer steps for the first time
    stepped: tuple[Callable[[Optimizer], None], ...] = ()  # an optimizer has stepped
    doubled: tuple[Callable[[], None], ...] = ()  # optimizers have stepped once, twice, four times, eight times and so on
    committed: tuple[Callable[[int], None], ...] = ()  # this step counts; what follows is done in its time
    step_ended: tuple[StepEnded, ...] = ()  # the number of the step, the samples of it, and where its time went
    ghost_ended: tuple[Callable[[], None], ...] = ()  # some worker had no samples in the step that ended
    went_back: tuple[Callable[[int], None], ...] = ()  # steps after this one were none

    def order(self) -> Iterator[str]:
        """Yield each moment with what is called at it, in order."""
        for moment in fields(self):
            if observers := getattr(self, moment.name):
                yield f"{moment.name}: {', '.join(each.__qualname__.rpartition('<locals>.')[2] for each in observers)}"
