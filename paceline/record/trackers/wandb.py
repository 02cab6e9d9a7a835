"""The Weights & Biases tracker: online if there is an API key, else in the run's folder.

paceline run --report-to wandb                  project from WANDB_PROJECT
paceline run --report-to wandb:team/project

`wandb sync` uploads a run that was offline.
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
from paceline.record.trackers.tracker import TrackedEvent, TrackedRun, TrackedStep, TrackedSummary

EVENT_KEY: Final = "paceline/event"
# Seconds at most to reach the server at the start.
_REACH: Final = 30
# Private setting of W&B: seconds between two writes of an offline run. A kill loses all that came
# since. If W&B renames the setting, W&B's own default applies.
_FLUSH_SETTING: Final = "x_transaction_log_flush_interval"
_OFFLINE_MODES: Final = ("offline", "dryrun")


class WandbTracker:
    """Reports a run to W&B.

    `detail` is PROJECT or ENTITY/PROJECT. Default: W&B's own settings.
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
        self._last_step = 0  # last step that was delivered
        self._events: list[str] = []  # all events
        self._step_events: list[str] = []  # events since that step

    def begin_run(self, run: TrackedRun) -> str:
        """Begin a run, or continue it.

        It never prompts for a key. If there is no key or no network, the run is offline.

        Raises:
            ImportError: W&B isn't installed.
            Exception: Any other error of W&B.
        """
        import wandb

        self._wandb = wandb
        mode = wandb.setup().settings.mode
        if mode == "disabled":
            self._run = self._init_run(run, mode)
            return "nothing is kept, as W&B is disabled here (WANDB_MODE)"
        if mode in _OFFLINE_MODES:
            return self._begin_offline(run, "as WANDB_MODE says so")
        if not self._has_key():
            return self._begin_offline(run, "as there is no API key (wandb login)")
        try:
            self._run = self._init_run(run, None)
        except wandb.errors.CommError as error:
            reason = " ".join(str(error).split())
            return self._begin_offline(
                run, f"as the server can't be reached ({reason})", again="-offline"
            )
        return str(self._run.url)

    def log_steps(self, steps: Sequence[TrackedStep]) -> None:
        """Log the numbers of steps."""
        for step_record in steps:
            if step_record.step != self._last_step:
                self._last_step, self._step_events = step_record.step, []
            self._run.log(step_record.to_scalars(), step=step_record.step)

    def log_media(self, items: Sequence[MediaItem]) -> None:
        """Log histograms and images.

        Raises:
            ImportError: There is an image, and pillow isn't installed.
        """
        for item in items:
            if isinstance(item.content, HistogramCounts):
                media = self._wandb.Histogram(
                    np_histogram=(list(item.content.counts), item.content.bin_edges)
                )
            else:
                from PIL import Image

                media = self._wandb.Image(Image.open(io.BytesIO(item.content.to_png())))
            self._run.log({item.name: media}, step=item.step)

    def log_event(self, event: TrackedEvent) -> None:
        """Log an event as a text at the last step."""
        self._step_events.append(event.what)
        self._events.append(f"{event.time:.1f} s: {event.what}")
        # W&B keeps one value of a name in a step, so all events of the step go into one text.
        self._run.log({EVENT_KEY: "; ".join(self._step_events)}, step=self._last_step)

    def rewind_to_step(self, step: int) -> None:
        """Do nothing: W&B keeps its values of steps that are taken again. They are the same."""

    def log_summary(self, end: TrackedSummary) -> None:
        """Log the settings, and the results in the run's summary."""
        self._run.config.update(dict(end.settings), allow_val_change=True)
        self._run.summary.update({**end.results, "paceline/events": "\n".join(self._events)})

    def close(self, *, failed: bool) -> None:
        """Finish the run. Calling it twice is harmless."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=int(failed))

    def _has_key(self) -> bool:
        """Whether W&B finds credentials, without output and without a prompt."""
        settings = self._wandb.setup().settings
        was_silent, settings.silent = settings.silent, True
        try:
            return bool(self._wandb.login(prompt=False, verify=False))
        finally:
            settings.silent = was_silent

    def _begin_offline(self, run: TrackedRun, why: str, *, again: str = "") -> str:
        """Begin the run offline, and return where it is, and `why`.

        `again` is added to its identifier.
        """
        self._run = self._init_run(run, "offline", again)
        folder = run.folder / "wandb" / Path(self._run.dir).parent.name
        return f"offline, {why}: wandb sync {shlex.quote(str(folder))} sends it later"

    def _init_run(self, run: TrackedRun, mode: str | None, again: str = "") -> Any:
        """Call `wandb.init` for this run."""
        settings = self._wandb.Settings(silent=True, init_timeout=_REACH)
        if _FLUSH_SETTING in self._wandb.Settings.model_fields:
            settings.update_from_dict({_FLUSH_SETTING: 1.0})
        return self._wandb.init(
            entity=self._entity,
            project=self._project,
            name=run.name,
            id=run.identity + again,
            dir=str(run.folder.absolute()),
            config=dict(run.settings),
            mode=mode,
            resume="allow",
            # The script's own run stays the one that `wandb.log` uses.
            reinit="create_new",
            settings=settings,
        )
