"""Examples of docstrings become blocks of code, and the words around them stay."""

from __future__ import annotations

from website.doctests import fenced


def test_an_example_is_a_block() -> None:
    text = (
        "Do it.\n\n>>> with a() as b:\n...     b.c()\n...\n>>> d\n[0.0, "
        "0.5]\n\nMore words.\n\n>>> e()"
    )
    assert fenced(text) == (
        "Do it.\n\n```python\nwith a() as b:\n    b.c()\n\nd\n# [0.0, 0.5]\n```\n\nMore "
        "words.\n\n```python\ne()\n```"
    )


def test_text_without_one_stays() -> None:
    text = "Do it...\n\n    a drawing   ... of something\n\nx >>> 3"
    assert fenced(text) == text
