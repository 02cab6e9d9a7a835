"""Weights & Biases: a run of its own, online where there is an API key, and else in the run's
folder for `wandb sync`.

paceline run --report-to wandb                  the project that WANDB_PROJECT says
paceline run --report-to wandb:team/project
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError
from paceline.record.logged.histogram import HistogramCounts
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.tracker import TrackedEnd, TrackedEvent, TrackedRun, TrackedStep

EVENT: Final = "paceline/event"
_REACH: Final = 30  # seconds at most to reach the server at the start
# seconds between two writes of an offline run: what comes between is lost in a kill
_FLUSH: Final = "x_transaction_log_flush_interval"
_OFFLINE: Final = ("offline", "dryrun")


class WandbTracker:
    """Gives a run to W&B.

    `detail`: PROJECT or ENTITY/PROJECT (default: what W&B's own settings say).
    """

    name = "wandb"

    def __init__(self, detail: str) -> None:
        entity, _, project = detail.rpartition("/")
        if "/" in entity or (detail and not project):
            raise UsageError(
                f"report_to='wandb:{detail}' can't be read; "
                "write wandb:PROJECT or wandb:ENTITY/PROJECT"
            )
        self._entity, self._project = entity or None, project or None
        self._wandb: Any = None
        self._run: Any = None
        self._step = 0  # the last that was told of
        self._events: list[str] = []  # all of them
        self._since: list[str] = []  # those of this step

    def begin(self, run: TrackedRun) -> str:
        """Begin a run, or go on with it.

        Never asks anybody for a key, and needs no network where there is none.

        Raises `ImportError` and W&B's own errors.
        """
        import wandb

        self._wandb = wandb
        mode = wandb.setup().settings.mode
        if mode == "disabled":
            self._run = self._init(run, mode)
            return "nothing is kept, as W&B is disabled here (WANDB_MODE)"
        if mode in _OFFLINE:
            return self._offline(run, "as WANDB_MODE says so")
        if not self._has_key():
            return self._offline(run, "as there is no API key (wandb login)")
        try:
            self._run = self._init(run, None)
        except wandb.errors.CommError as error:
            reason = " ".join(str(error).split())
            return self._offline(
                run, f"as the server can't be reached ({reason})", again="-offline"
            )
        return str(self._run.url)

    def steps(self, steps: Sequence[TrackedStep]) -> None:
        """Log the numbers of steps."""
        for each in steps:
            if each.step != self._step:
                self._step, self._since = each.step, []
            self._run.log(each.scalars(), step=each.step)

    def media(self, items: Sequence[MediaItem]) -> None:
        """Log histograms and images. Raises `ImportError` for an image without pillow."""
        for item in items:
            if isinstance(item.content, HistogramCounts):
                shown = self._wandb.Histogram(
                    np_histogram=(list(item.content.counts), item.content.edges)
                )
            else:
                from PIL import Image

                shown = self._wandb.Image(Image.open(io.BytesIO(item.content.png())))
            self._run.log({item.name: shown}, step=item.step)

    def event(self, event: TrackedEvent) -> None:
        """Log an event as text, at the last step."""
        self._since.append(event.what)
        self._events.append(f"{event.time:.1f} s: {event.what}")
        self._run.log({EVENT: "; ".join(self._since)}, step=self._step)

    def rewind(self, step: int) -> None:
        """Leave it to W&B, which keeps what it has of steps that are taken again: they come to
        the same.
        """

    def conclude(self, end: TrackedEnd) -> None:
        """Log the settings, and the results in the run's summary."""
        self._run.config.update(dict(end.settings), allow_val_change=True)
        self._run.summary.update({**end.results, "paceline/events": "\n".join(self._events)})

    def close(self, *, failed: bool) -> None:
        """Finish the run. Calling it twice is harmless."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=int(failed))

    def _has_key(self) -> bool:
        """Whether W&B finds credentials; without a word, and without asking."""
        settings = self._wandb.setup().settings
        before, settings.silent = settings.silent, True
        try:
            return bool(self._wandb.login(prompt=False, verify=False))
        finally:
            settings.silent = before

    def _offline(self, run: TrackedRun, why: str, *, again: str = "") -> str:
        self._run = self._init(run, "offline", again)
        folder = run.folder / "wandb" / Path(self._run.dir).parent.name
        return f"offline, {why}: wandb sync {shlex.quote(str(folder))} sends it later"

    def _init(self, run: TrackedRun, mode: str | None, again: str = "") -> Any:
        settings = self._wandb.Settings(silent=True, init_timeout=_REACH)
        if _FLUSH in self._wandb.Settings.model_fields:  # W&B may rename it
            settings.update_from_dict({_FLUSH: 1.0})
        return self._wandb.init(
            entity=self._entity,
            project=self._project,
            name=run.name,
            id=run.identity + again,
            dir=str(run.folder.absolute()),
            config=dict(run.settings),
            mode=mode,
            resume="allow",
            reinit="create_new",  # the script's own run stays the one that `wandb.log` means
            settings=settings,
        )
