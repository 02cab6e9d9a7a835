"""The vocabulary has each word once, in order, in two sentences at most, and says where it is
explained.
"""

from __future__ import annotations

import re

from tests.harness.documents import ROOT

ROW = re.compile(r"^\| \*\*(.+?)\*\* \| (.*) \|$", re.MULTILINE)
WANTED = {
    *(
        "share",
        "turn",
        "ghost",
        "view",
        "rank",
        "worker",
        "host",
        "mesh",
        "axis",
        "replica",
        "stage",
        "micro-batch",
    ),
    *("staleness", "residual", "lockstep", "route", "schedule", "codec", "bucket"),
}


def rows(page: str) -> list[tuple[str, str]]:
    return ROW.findall((ROOT / page).read_text())


def sentences(text: str) -> int:
    """The number of sentences; dots in code and in addresses are none."""
    return len(re.findall(r"[.?!](?=\s|$)", re.sub(r"\]\([^)]*\)|`[^`]*`", "]", text)))


def test_words_are_in_order_and_each_is_there_once() -> None:
    words = [word for word, _ in rows("docs/vocabulary.md")]
    assert len(words) >= 40 and set(words) >= WANTED
    assert words == sorted(set(words), key=str.lower)


def test_each_is_two_sentences_and_says_where_more_is() -> None:
    found = rows("docs/vocabulary.md")
    assert [word for word, text in found if "](" not in text] == []
    assert [(word, sentences(text)) for word, text in found if not 1 <= sentences(text) <= 2] == []


def test_sentences_are_counted() -> None:
    assert (
        sentences("Samples of all, `run.size. Of` them. Are there two? There are: [Here](a.md. b).")
        == 3
    )


def test_no_word_of_users_is_explained_to_developers_once_more() -> None:
    ours = {word for word, _ in rows("docs/architecture.md")}
    assert ours and not ours & {word for word, _ in rows("docs/vocabulary.md")}


def test_it_is_found_from_where_people_begin() -> None:
    assert "](docs/vocabulary.md)" in (ROOT / "README.md").read_text()
    assert "](vocabulary.md)" in (ROOT / "docs" / "index.md").read_text()
    assert "](vocabulary.md)" in (ROOT / "docs" / "architecture.md").read_text()
