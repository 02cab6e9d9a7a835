"""Keeps histograms and images in the folder of a run: lines of media.jsonl, and PNG files.

runs/NAME/
  media.jsonl                {"step": 120, "time": 8.1, "name": "weights", "kind": "histogram", ...}
                             {"step": 120, ..., "kind": "image", "file": "media/val/sample-120.png"}
  media/val/sample-120.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from paceline.record.folder import RunFolder, to_strict_json
from paceline.record.jsonl import JsonLines
from paceline.record.logged.image import Pixels
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.tracker import TrackedEvent, TrackedRun, TrackedStep, TrackedSummary


class MediaFolder:
    """A tracker that writes histograms and images into the folder of the run."""

    name = "the run's folder"

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._lines = folder, JsonLines(folder.media)

    def begin_run(self, run: TrackedRun) -> str:
        """Return the path of the file."""
        return str(self._folder.media)

    def log_steps(self, steps: Sequence[TrackedStep]) -> None:
        """Do nothing, because steps are in metrics.jsonl."""

    def log_media(self, items: Sequence[MediaItem]) -> None:
        """Write histograms and images.

        Raises:
            OSError, ResourceError: The disk refuses.
        """
        lines = []
        for item in items:
            fields = {
                "step": item.step,
                "time": round(item.time, 6),
                "name": item.name,
                **item.content.to_fields(),
            }
            if isinstance(item.content, Pixels):
                file = Path("media", f"{media_file_name(item.name)}-{item.step}.png")
                path = self._folder.path / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(item.content.to_png())
                fields["file"] = file.as_posix()
            lines.append(to_strict_json(fields))
        self._lines.append_lines(lines)

    def log_event(self, event: TrackedEvent) -> None:
        """Do nothing, because events are in the summary."""

    def rewind_to_step(self, step: int) -> None:
        """Remove the lines of steps after `step`.

        Images of those steps are overwritten when the steps are taken again.
        """
        self._lines.cut_after_step(step)

    def log_summary(self, end: TrackedSummary) -> None:
        """Do nothing, because summary.json has it."""

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self._lines.close()


def media_file_name(name: str) -> str:
    """Return a safe relative path for a logged name.

    The name may contain slashes. No part can lead out of the folder, and special characters are
    quoted.
    """
    name_parts = [quote(name_part, safe=" ()+,=@") for name_part in name.split("/")]
    # Parts such as "." and ".." would lead elsewhere.
    return "/".join(
        name_part.replace(".", "%2E") if name_part.strip(".") == "" else name_part
        for name_part in name_parts
        if name_part
    )
