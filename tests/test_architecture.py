"""What docs/architecture.md and CONTRIBUTING.md name is there, and every folder of the package has its line."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paceline"
MAP = (ROOT / "docs" / "architecture.md").read_text()
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
INVENTED = {"docs/yours.md", "paceline/sync/yours.py", "tests/sync/test_yours.py"}


def entries(text: str) -> dict[str, str]:
    """The folders of the tree, each with what is said of it."""
    tree = text.split("## Where things are")[1].split("\n## ", maxsplit=1)[0]
    return dict(re.findall(r"^- `([\w./]+)/`: (.*?)(?=^- |^$)", tree, re.MULTILINE | re.DOTALL))


def missing(text: str) -> list[str]:
    """The modules and folders that a map names and that aren't there."""
    named = [PACKAGE / folder for folder in entries(text)]
    named += [PACKAGE / folder / module for folder, said in entries(text).items() for module in re.findall(r"`(\w+\.py)`", said)]
    named += [(ROOT if path.startswith("tests/") else PACKAGE) / path for path in re.findall(r"[\w/]+/\w+\.py\b", text)]
    return [path.relative_to(ROOT).as_posix() for path in named if not path.exists()]


def test_what_the_map_names_is_there() -> None:
    assert missing(MAP) == []


def test_every_folder_is_on_the_map() -> None:
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert folders - set(entries(MAP)) == set()


def test_what_is_gone_is_seen() -> None:
    text = "## Where things are\n\n- `gone/`: no.\n- `comm/`: `group.py`, `gone.py`.\n\n## A step\n\n  comm/lost.py  sync/base.py\n"
    assert missing(text) == ["paceline/gone", "paceline/comm/gone.py", "paceline/comm/lost.py"]


def test_what_the_guide_names_is_there() -> None:
    paths = set(re.findall(r"(?:paceline|tests|benchmarks|docs)/[\w/]+\.\w+", GUIDE)) - INVENTED
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_guide_names_what_is_in_its_files() -> None:
    named = re.findall(r"`([A-Z_]{4,})` in\s+`([\w/]+\.py)`", GUIDE)
    assert len(named) == 5
    assert [name for name, path in named if not re.search(rf"^{name}\b", (ROOT / path).read_text(), re.MULTILINE)] == []
