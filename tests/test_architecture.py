"""What docs/architecture.md and CONTRIBUTING.md name is there, and docs/modules.md has every
module.
"""

from __future__ import annotations

import re
from pathlib import Path

from website import modules

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paceline"
MAP = (ROOT / "docs" / "architecture.md").read_text()
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
INVENTED = {"docs/yours.md", "paceline/sync/yours.py", "tests/sync/test_yours.py"}


def missing(text: str) -> list[str]:
    """The modules that a map names and that aren't there."""
    named = [
        (ROOT if path.startswith("tests/") else PACKAGE) / path
        for path in re.findall(r"[\w/]+/\w+\.py\b", text)
    ]
    return [path.relative_to(ROOT).as_posix() for path in named if not path.exists()]


def test_what_the_map_names_is_there() -> None:
    assert missing(MAP) == []


def test_what_is_gone_is_seen() -> None:
    assert missing("  comm/lost.py  sync/base.py\n") == ["paceline/comm/lost.py"]


def test_the_list_of_modules_is_that_of_the_package() -> None:
    assert modules.PAGE.read_text() == modules.written(), "run python -m website.modules"


def test_what_the_guide_names_is_there() -> None:
    paths = set(re.findall(r"(?:paceline|tests|benchmarks|docs)/[\w/]+\.\w+", GUIDE)) - INVENTED
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_guide_names_what_is_in_its_files() -> None:
    named = re.findall(r"`([A-Z_]{4,})` in\s+`([\w/]+\.py)`", GUIDE)
    assert len(named) == 5
    assert [
        name
        for name, path in named
        if not re.search(rf"^{name}\b", (ROOT / path).read_text(), re.MULTILINE)
    ] == []
