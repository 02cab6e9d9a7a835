"""Writes all pictures into docs/pictures: `python -m website.pictures`."""

from __future__ import annotations

from pathlib import Path

from website.pictures import all_reduce, pipelines, sharding, shares, staleness

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def drawn() -> dict[str, str]:
    """Return all pictures by the names of their files."""
    others = {
        "pipelines": pipelines,
        "shares": shares,
        "sharding": sharding,
        "staleness": staleness,
    }
    return {
        **all_reduce.pictures(),
        **{f"{name}.svg": module.picture() for name, module in others.items()},
    }


if __name__ == "__main__":
    for name, text in drawn().items():
        (FOLDER / name).write_text(text)
