"""Causes of a late worker: their names in messages and reports, and advice for each.

own work of a step   [ data loading ][ compute                                   ]

Garbage collection, a stolen processor and swapping interrupt both parts. Their time is subtracted
from the part that they interrupt, so that all causes add up to the own work.
"""

from __future__ import annotations

from typing import Final

from paceline.trace import MEASURED_CAUSES

# "compute" is the own work without the measured causes. The causes before "stolen" are work of the
# worker itself; "stolen" and the causes after it keep the worker from working.
CAUSES: Final = ("compute", *MEASURED_CAUSES)
WORDS: Final = {
    "compute": "compute",
    "reading": "data loading",
    "collection": "garbage collection",
    "stolen": "stolen processor",
    "paging": "swapping",
}
REMEDIES: Final = {
    "reading": (
        "Let other processes prepare its batches, DataLoader(..., num_workers=2 or more, "
        "persistent_workers=True), or more of them; "
        "or look at the disk that it reads from"
    ),
    "collection": (
        "Python searches for garbage there: call gc.freeze() once the run is prepared, or "
        "gc.disable() and gc.collect() between epochs"
    ),
    "stolen": (
        "Something else has its processor: see what runs there (top), raise the quota of its "
        "container, start other programs with nice, "
        "or give it fewer threads (OMP_NUM_THREADS); if that can't be helped, deal by speed: "
        "prepare(..., shares='auto')"
    ),
    "paging": (
        "Its memory is short: smaller micro-batches (run.step(..., micro_batches=k)), fewer "
        "readers, or less beside it"
    ),
}
