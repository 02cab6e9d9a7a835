"""Opens the records of a run: a folder that all workers agree on; trackers and log on the first."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgpack

from paceline.cluster.control import events
from paceline.formatting import format_as_call
from paceline.record.call_status import make_status_display
from paceline.record.folder import RunFolder
from paceline.record.history import RunHistory
from paceline.record.log import MetricsLog, OnNan
from paceline.record.outcome.goodput import read_earlier_starts
from paceline.record.trackers.feed import TrackerFeed
from paceline.record.trackers.tracker import Setting, Tracker
from paceline.record.writer import MetricsWriter
from paceline.session.assemble import JoinedWorker
from paceline.sync.base import Strategy


class RecordOpener:
    """Opens the folder, the trackers and the log of a run on one worker.

    `folder` is the folder for all runs of the script.
    """

    def __init__(
        self,
        joined: JoinedWorker,
        folder: str,
        name: str | None,
        on_nan: OnNan,
        *,
        strategy: Strategy,
        trackers: Iterable[Tracker] = (),
    ) -> None:
        self._worker, self._axes, self._name, self._on_nan = (
            joined.view.worker,
            joined.axes,
            name,
            on_nan,
        )
        place = self._worker.place
        self._root = Path(place.layout or place.folder or folder)
        self._strategy, self._trackers = strategy, list(trackers)

    def open_records(self, history: RunHistory, adds: bool) -> tuple[RunFolder, MetricsLog]:
        """Open the folder, the trackers and the log.

        `adds`: whether each worker has samples of its own in a step.
        """
        folder, worker = self._open_folder(), self._worker
        self._continue_history(history)
        feed = self._begin_trackers(folder, history)
        # the launcher passes these on to workers that it starts later
        events.report_run_folder(
            worker.place, str(folder.path.absolute()), history.seed, history.began
        )
        if worker.page is not None:
            worker.page.write_run_folder(folder.path)
        # a writer that stands by begins to write only when it takes over
        writer = self._make_writer(folder, feed, adds=adds)
        if writer is not None and not writer.stands_by:
            events.report_writer(worker.place, str(folder.path.absolute()))
        mesh, accounts = self._axes.mesh if self._axes.cut_axes else None, self._axes.slice.accounts
        return folder, MetricsLog(
            writer, on_nan=self._on_nan, say=history.announce_event, accounts=accounts, mesh=mesh
        )

    def _open_folder(self) -> RunFolder:
        """Open the folder of a run that is joined or resumed, or create one.

        Collective.
        """
        place, start = self._worker.place, self._worker.place.job_start
        name = self._name if self._name is not None else place.run_name
        if place.run is not None:
            return RunFolder(Path(place.run[0]))
        if start is not None and start.folder is not None:
            # other hosts need not have the folder; that of `pl.load` is gone after a failed start
            if place.rank == 0:
                Path(start.folder).mkdir(parents=True, exist_ok=True)
            return RunFolder.reopen_folder(Path(start.folder), name)
        return RunFolder.create_together(
            self._axes.everyone, self._root, name, say=self._worker.say
        )

    def _continue_history(self, history: RunHistory) -> None:
        """Begin the history with the first start of the job, and note why earlier starts ended."""
        start = self._worker.place.job_start
        if start is not None and start.events:
            began = history.began if start.folder is None else start.began
            earlier = [
                {"time": max(when - began, 0.0), "what": what} for when, what in start.events
            ]
            history.adopt_facts(
                {**history.collect_facts(), "events": earlier + history.events, "began": began}
            )

    def _begin_trackers(self, folder: RunFolder, history: RunHistory) -> TrackerFeed:
        """Begin the run in all trackers of the first worker, and agree on its beginning.

        Collective, except on a worker that joins later.
        """
        worker, start, mesh = self._worker, self._worker.place.job_start, self._axes.mesh
        settings: dict[str, Setting] = {
            "sync": format_as_call(self._strategy),
            "workers": worker.place.size,
            "hosts": len(worker.cluster.hosts),
        }
        if self._axes.cut_axes:
            settings["mesh"] = ", ".join(f"{axis}={size}" for axis, size in mesh.axes)
        feed = TrackerFeed(
            self._trackers,
            folder,
            history,
            worker.say,
            settings=settings,
            again=start is not None and start.folder is not None,
            # trackers have heard of all earlier ends but the last
            events_told=0 if start is None else max(len(start.events) - 1, 0),
            timings=worker.place.timings.trackers,
        )
        if worker.place.run is not None:
            return feed

        def begin() -> bytes:
            feed.begin_trackers()
            return bytes(msgpack.packb(history.began))

        history.adopt_facts(
            {
                **history.collect_facts(),
                "began": msgpack.unpackb(
                    self._axes.everyone.tell_everyone("where the run is reported to", begin)
                ),
            }
        )
        return feed

    def _make_writer(
        self, folder: RunFolder, feed: TrackerFeed, *, adds: bool
    ) -> MetricsWriter | None:
        """Make the writer of metrics on the first worker.

        If the run survives losses, all workers have one, as any may have to take over.
        """
        place = self._worker.place
        if place.rank == 0 and not place.joining:
            start, earlier = place.job_start, None
            if start is not None and start.folder is not None:
                earlier = read_earlier_starts(folder.live, start.began, start.events, place.size)
            display = make_status_display(place)
            return MetricsWriter(folder, display, adds=adds, feed=feed, earlier=earlier)
        return (
            None
            if place.worker is None
            else MetricsWriter(folder, stands_by=True, adds=adds, feed=feed)
        )
