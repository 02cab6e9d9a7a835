"""The folder of a run as it keeps histograms and images: a line of media.jsonl for each, and an
image's pixels as a PNG.

runs/NAME/
  media.jsonl                {"step": 120, "time": 8.1, "name": "weights", "kind": "histogram",
                             "low": -1.2, ..., "counts": [...]}
                             {"step": 120, "time": 8.1, "name": "val/sample", "kind": "image", ...,
                             "file": "media/val/sample-120.png"}
  media/val/sample-120.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from paceline.record.folder import RunFolder, strict_json
from paceline.record.jsonl import JsonLines
from paceline.record.logged.image import Pixels
from paceline.record.logged.media import MediaItem
from paceline.record.trackers.tracker import TrackedEnd, TrackedEvent, TrackedRun, TrackedStep


class MediaFolder:
    """Writes histograms and images into the folder of a run."""

    name = "the run's folder"

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._lines = folder, JsonLines(folder.media)

    def begin(self, run: TrackedRun) -> str:
        """Say where."""
        return str(self._folder.media)

    def steps(self, steps: Sequence[TrackedStep]) -> None:
        """Leave them to metrics.jsonl."""

    def media(self, items: Sequence[MediaItem]) -> None:
        """Write them. Raises `OSError` and `ResourceError` if the disk refuses."""
        lines = []
        for item in items:
            fields = {
                "step": item.step,
                "time": round(item.time, 6),
                "name": item.name,
                **item.content.fields(),
            }
            if isinstance(item.content, Pixels):
                file = Path("media", f"{file_name(item.name)}-{item.step}.png")
                path = self._folder.path / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(item.content.png())
                fields["file"] = file.as_posix()
            lines.append(strict_json(fields))
        self._lines.append(lines)

    def event(self, event: TrackedEvent) -> None:
        """Leave it to the summary."""

    def rewind(self, step: int) -> None:
        """Remove the lines of steps after this one; their images are overwritten when those are
        taken again.
        """
        self._lines.cut(step)

    def conclude(self, end: TrackedEnd) -> None:
        """Leave it to summary.json."""

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self._lines.close()


def file_name(name: str) -> str:
    """Return a relative path for a name that was logged: its parts between slashes, in which no
    sign leads elsewhere.
    """
    parts = [quote(part, safe=" ()+,=@") for part in name.split("/")]
    return "/".join(
        part.replace(".", "%2E") if part.strip(".") == "" else part for part in parts if part
    )
