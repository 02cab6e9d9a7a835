"""The glossary has each word once, in order, in two sentences at most, with a link."""

from __future__ import annotations

import re

from tests.harness.documents import DOCS, ROOT

ROW = re.compile(r"^\| \*\*(.+?)\*\* \| (.*) \|$", re.MULTILINE)
WANTED = {
    *("share", "turn", "ghost", "view", "rank", "worker", "host", "mesh", "axis", "replica"),
    *("stage", "micro-batch", "staleness", "residual", "lockstep", "route", "schedule", "codec"),
    "bucket",
}


def rows(heading: str) -> list[tuple[str, str]]:
    """The words of a section of the glossary, and what it says of them."""
    page = (DOCS / "glossary.md").read_text()
    return ROW.findall(page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0])


def sentences(text: str) -> int:
    """The number of sentences; dots in code and in addresses are none."""
    return len(re.findall(r"[.?!](?=\s|$)", re.sub(r"\]\([^)]*\)|`[^`]*`", "]", text)))


def test_words_are_in_order_and_each_is_there_once() -> None:
    words = [word for word, _ in rows("Words")]
    assert len(words) >= 40 and set(words) >= WANTED
    code = [word for word, _ in rows("Words of the code")]
    assert code and not set(code) & set(words)
    for listed in (words, code):
        assert listed == sorted(set(listed), key=str.lower)


def test_each_is_two_sentences_and_says_where_more_is() -> None:
    found = rows("Words")
    assert [word for word, text in found if "](" not in text] == []
    counted = {word: sentences(text) for word, text in found + rows("Words of the code")}
    assert {word: count for word, count in counted.items() if not 1 <= count <= 2} == {}


def test_sentences_are_counted() -> None:
    assert (
        sentences("Samples of all, `run.size. Of` them. Are there two? There are: [Here](a.md. b).")
        == 3
    )


def test_it_is_found_from_where_people_begin() -> None:
    assert "](docs/glossary.md)" in (ROOT / "README.md").read_text()
    assert "](glossary.md)" in (DOCS / "index.md").read_text()
    assert "](glossary.md" in (DOCS / "architecture.md").read_text()
