"""What is text stays text."""

from __future__ import annotations

from paceline.observe.page.markup import Markup, element, join_markup
from tests.harness.pages import Tags


def test_children_in_order() -> None:
    made = element(
        "p",
        {"class": "x", "id": None},
        "one ",
        element("b", None, "two"),
        [" three", 4, None],
        element("br"),
    )
    assert made == '<p class="x">one <b>two</b> three4<br/></p>'


def test_nothing_becomes_markup() -> None:
    bad = '<script>alert("1")</script>'
    text = element("p", {"title": f'"{bad}'}, bad)
    assert Tags(text).found == [("p", {"title": f'"{bad}'})]


def test_signs_that_no_page_may_have() -> None:
    assert element("p", None, "a\x00b\ud800c") == "<p>a�b�c</p>"


def test_numbers() -> None:
    assert element("line", {"x1": 1.0, "x2": 1 / 3}) == '<line x1="1" x2="0.333333"/>'


def test_markup_is_not_escaped_again() -> None:
    assert join_markup(Markup("<b>1</b>"), "<", [None, 2]) == "<b>1</b>&lt;2"
    # which browsers don't take for an end without its slash alone
    assert element("div") == "<div></div>"
