"""The reference of Python names: a page for each part of `paceline`, and one for `paceline.lab`,
made of docstrings.
"""

from __future__ import annotations

from collections import defaultdict

import paceline
from paceline import lab

PARTS = {  # the folder that a name comes from: its page, and what the page says first
    "session": (
        "runs",
        "Runs",
        "What a script holds: `pl.start` joins the workers, and gives a `Run`.",
    ),
    "data": (
        "samples",
        "Samples",
        "What samples take, where they differ: `run.prepare(loader, cost=...)`.",
    ),
    "sync": (
        "strategies",
        "Strategies",
        "When replicas agree, with whom, and what they send: `pl.start(sync=...)`, or `--sync`.",
    ),
    "codec": (
        "codecs",
        "Codecs",
        "How gradients and changes are written on the wire: the `codec` of a strategy.",
    ),
    "parallel": (
        "cuts",
        "Cuts and layers",
        (
            "How a model that is too large for a worker is cut: `run.prepare(..., "
            "cut=...)`, or `--cut`."
        ),
    ),
    "planner": ("plans", "Plans", "Which way of training is fastest, before a run: `pl.plan`."),
    "checkpoint": ("checkpoints", "Checkpoints", "Models out of what a run has saved."),
    "errors": (
        "errors",
        "Errors",
        "What paceline raises on purpose. All of them are `PacelineError`.",
    ),
}
# folders of few names, which stand on the page of another
BESIDE = {"record": "session", "notebook": "session", "servers": "sync"}
FOLDER = "reference/python"


def pages() -> dict[str, str]:
    """Return the pages by their names on the site."""
    parts = defaultdict(list)
    # with which everybody begins
    for name in sorted(paceline.__all__, key=lambda name: name != "start"):
        if not name.startswith("_"):
            home = getattr(paceline, name)
            part = home.__module__.split(".")[1]
            parts[BESIDE.get(part, part)].append(
                (f"paceline.{name}", f"{home.__module__}.{home.__qualname__}")
            )
    texts = {
        f"{FOLDER}/{PARTS[part][0]}.md": _page(*PARTS[part][1:], found)
        for part, found in parts.items()
    }
    homes = {name: getattr(lab, name) for name in lab.__all__}
    found = [
        (f"paceline.lab.{name}", f"{home.__module__}.{home.__qualname__}")
        for name, home in homes.items()
    ]
    return {
        **texts,
        f"{FOLDER}/lab.md": _page(
            "The lab", "Clusters on this machine, from Python: `from paceline import lab`.", found
        ),
    }


def _page(title: str, said: str, found: list[tuple[str, str]]) -> str:
    blocks = [
        (
            f'::: {path}\n    options:\n      heading: "{name}"\n      toc_label: '
            f'"{name.rpartition(".")[2]}"\n'
        )
        for name, path in found
    ]
    return "\n".join([f"# {title}", "", said, "", *blocks])
