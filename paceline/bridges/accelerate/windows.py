"""Makes all batches that are accumulated for one optimizer step one turn of the run.

accumulation of 2     batch 0    batch 1    batch 2    batch 3    batch 4     (the epoch ends)
turns of the run      |--- turn 0 ---------||--- turn 1 ---------||- turn 2 -|

A run counts its steps, synchronizes replicas and keeps its bounds by turns, so a turn has to be one
step of the optimizer. A turn has the weight of its first batch; `factor` corrects the others.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.data.loader import LoaderObserver, ShareLoader, Turn


class AccumulationWindows:
    """A `LoaderObserver` that passes one turn for each window of batches to another observer.

    Attributes:
        factor: What the loss of the present batch must be multiplied by, as its turn has the
            weight of the first batch of the window. 1 in most batches.

    Args:
        inner: Observer of the run.
        next_length: Returns the number of batches of the window that begins.
        reads_ahead: Whether all batches of a window are read before the first is trained on.
    """

    def __init__(
        self, inner: LoaderObserver, next_length: Callable[[], int], *, reads_ahead: bool = False
    ) -> None:
        self._inner, self._next_length, self._reads_ahead = inner, next_length, reads_ahead
        self.changes = inner.changes
        self.factor = 1.0
        self._left = 0  # batches that the present window still lacks
        self._open = False  # a turn of the run is under way for a window
        self._scale = 1.0  # scale of the window's turn

    def prepare_epoch(self, loader: ShareLoader) -> None:
        """Pass the beginning of an epoch on."""
        self._inner.prepare_epoch(loader)

    def generation(self, loader: ShareLoader) -> int:
        """Generation of the workers."""
        return self._inner.generation(loader)

    def begin_epoch(self, loader: ShareLoader) -> None:
        """Begin an epoch with a new window; a window that a `break` has left open is over."""
        self._left, self._open, self.factor = 0, False, 1.0
        self._inner.begin_epoch(loader)

    def begin_turn(self, loader: ShareLoader, turn: Turn) -> None:
        """Begin a batch, and a window if none is under way."""
        if not turn.train:
            self._inner.begin_turn(loader, turn)
            return
        # A worker without samples has buffers that its turn must put back, so its batch gets a
        # turn of its own. If batches are read ahead, the turn of the others isn't over yet.
        if self._open and turn.source is not None and not self._reads_ahead:
            self._end_window(loader)
        if not self._open:
            self._left = 1 if turn.source is not None else max(1, self._next_length())
            self._open, self._scale = True, turn.scale
            self._inner.begin_turn(loader, turn)
        self._left -= 1
        self.factor = 0.0 if turn.ghost else turn.scale / self._scale if self._scale else 1.0

    def end_turn(self, loader: ShareLoader) -> None:
        """End a batch, and its window if it is the last one."""
        if not loader.terms.training:
            self._inner.end_turn(loader)
        elif self._open and self._left == 0:
            self._end_window(loader)

    def end_epoch(self, loader: ShareLoader) -> None:
        """End an epoch, and a window that has fewer batches than others."""
        if self._open:
            self._end_window(loader)
        self._inner.end_epoch(loader)

    def _end_window(self, loader: ShareLoader) -> None:
        self._open, self._left = False, 0
        self._inner.end_turn(loader)
