"""The pages that people read, and what stands in them: blocks of code with what is said about
running them, links, and anchors.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# what a page says before a block that is to be a file
SAVED = re.compile(r"(?:[Ss]ave (?:it|this) as|with this as) `(\w+\.\w+)`")
TRAINING = "examples/train.py"


class Block(NamedTuple):
    """A fenced block.

    `mark`: the comment right before it, or empty; `name`: of the file that the page calls it, or
    empty.
    """

    language: str
    body: str
    mark: str = ""
    name: str = ""

    @property
    def commands(self) -> list[str]:
        """What is typed: the lines after a prompt, without comments."""
        return [
            line[2:].split("  #")[0].strip()
            for line in self.body.splitlines()
            if line.startswith("$ ")
        ]

    @property
    def output(self) -> list[str]:
        """The other lines."""
        return [line for line in self.body.splitlines() if not line.startswith("$ ")]

    @property
    def marked(self) -> tuple[str, str]:
        """What is done with a block that isn't simply run, and why: `not run: needs another
        machine` are two parts.
        """
        what, _, why = self.mark.partition(": ")
        return what, why

    @property
    def of_lab(self) -> bool:
        """Whether it builds clusters of the lab."""
        return (
            any(
                line.startswith(("paceline lab run", "paceline lab probe"))
                for line in self.commands
            )
            or "lab.cluster(" in self.body
        )


def name(page: Path) -> str:
    """Return how a page is called in the names of tests."""
    return page.relative_to(ROOT).as_posix()


@cache
def text(page: Path) -> str:
    return page.read_text()


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return parse(text(page))


def parse(page: str) -> list[Block]:
    """Return the fenced blocks of a text."""
    found, last = [], 0
    for block in BLOCK.finditer(page):
        saved = SAVED.findall(page[last : block.start()])
        found.append(
            Block(block["language"], block["body"], block["mark"] or "", saved[-1] if saved else "")
        )
        last = block.end()
    return found


def links(page: str) -> list[str]:
    """Return where links and pictures of a text lead, those in code left out."""
    outside = re.sub(r"^```.*?^```|`[^`\n]+`", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", outside)


def led_to(page: Path) -> list[Path]:
    """Return the pages to which one leads, each once."""
    targets = (
        page.parent / link.partition("#")[0] for link in links(text(page)) if "://" not in link
    )
    return [
        target for target in dict.fromkeys(path.resolve() for path in targets) if target in PAGES
    ]


def anchors(page: str) -> set[str]:
    """Return what GitHub makes of the headings of a text."""
    outside = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
