"""The bar fits any terminal, and other text stays as it was written, whatever the order, and
however the terminal changes.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.status import live_bar
from paceline.status.live_bar import LiveBar, can_show_bar, draw_status, reflows_lines
from paceline.status.run_status import RunStatus
from tests.harness.terminal_screen import TerminalScreen

PARTS = {"compute": 0.6, "exchange": 0.2, "wait": 0.1, "data": 0.1}
CURVE = tuple(3.0 - number / 20 for number in range(40))
LATE = "rank 2 on c late 41%: data loading"
WHOLE = RunStatus(
    361, 800, 2, 3, {"loss": 2.34567, "accuracy": 0.5}, CURVE, 1234.4, PARTS, 12.3, LATE
)


def lines(status: RunStatus, columns: int, height: int = 5, *, plain: bool = False) -> list[str]:
    """What is drawn, without colours."""
    found = [
        re.sub(r"\x1b\[[\d;]*m", "", text)
        for _, text in draw_status(status, columns, height, plain=plain)
    ]
    assert [len(text) for text in found] == [
        cells for cells, _ in draw_status(status, columns, height, plain=plain)
    ]
    return found


def test_a_wide_terminal() -> None:
    first, second = lines(WHOLE, 120)
    assert re.fullmatch(
        r"epoch 2/3  ━{20}[━╸]━+  step 361/800  loss 2.346 █[█▇▆▅▄▃▂▁]{14}▁  0:12 left", first
    )
    assert (
        second
        == f"1,234 samples/s  compute 60% exchange 20% wait 10% data 10%  {LATE}  accuracy 0.5"
    )


def test_a_narrow_terminal_loses_nothing() -> None:
    assert lines(WHOLE, 39) == [
        "epoch 2/3  ━━━━━━╸━━━━━━━  step 361/800",
        "loss 2.346 █▇▆▅▄▃▂▁  0:12 left",
        "1,234 samples/s",
        "c 60% e 20% w 10% d 10%",
        "rank 2 on c late 41%: data loading",
    ]


def test_terminals_in_ascii() -> None:
    found = lines(WHOLE, 100, plain=True)
    assert all(text.isascii() for text in found) and re.match(
        r"epoch 2/3  #+-+  step 361/800  loss 2.346  0:12 left", found[0]
    )


def test_what_is_unknown_is_left_out() -> None:
    assert lines(RunStatus(3), 80) == ["step 3"]
    assert lines(RunStatus(3, values={"loss": 1.0}), 80) == ["step 3  loss 1"]
    assert lines(replace(WHOLE, steps=None, left=None), 120)[0].startswith(
        "epoch 2/3  step 361  loss 2.346 █"
    )
    # a run may go on beyond what it said
    assert all("━━━━" in lines(RunStatus(step, 10), 40)[0] for step in (0, 30))


@pytest.mark.parametrize("columns", [1, 2, 7, 13, 20, 30, *range(36, 140, 9), 400])
@pytest.mark.parametrize("height", [1, 2, 5])
def test_it_fits_any_terminal(columns: int, height: int) -> None:
    for status in (
        WHOLE,
        replace(WHOLE, steps=10**12, step=10**11, epochs=10**6),
        replace(WHOLE, values={"a very long name " * 9: 1.0}),
    ):
        found = lines(status, columns, height)
        assert 1 <= len(found) <= height and all(len(text) <= columns for text in found)


def test_colours_are_there_unless_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[36m" in draw_status(WHOLE, 100, 5)[0][1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(
        r"\x1b\[[\d;]*3\dm", "".join(text for _, text in draw_status(WHOLE, 100, 5))
    )


@pytest.mark.parametrize(
    ("environ", "can"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": ""}, False),
        ({}, False),
        ({"TERM": "xterm", "CI": "true"}, False),
        ({"TERM": "xterm", "CI": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True),
    ],
)
def test_which_terminals_have_one(environ: dict[str, str], can: bool) -> None:
    assert can_show_bar(environ) == can


def test_terminals_that_leave_long_lines_as_they_are() -> None:
    assert (
        reflows_lines({})
        and not reflows_lines({"XTERM_VERSION": "XTerm(372)"})
        and not reflows_lines({"STY": "1234.pts-0"})
    )


class Shown:
    """A bar on a terminal, and the text above it."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.screen, self.above = TerminalScreen(columns, lines), TerminalScreen(columns, lines)
        self.bar = LiveBar(self.screen.size)

    def write(self, text: str) -> None:
        self.screen.feed(self.bar.erase_bar())
        self.screen.feed(text)
        self.above.feed(text)
        self.bar.note_output(text.encode())
        self.screen.feed(self.bar.draw_bar())

    def show(self, step: int) -> None:
        self.bar.set_status(replace(WHOLE, step=step))
        self.screen.feed(self.bar.redraw_bar())


def test_text_comes_above_it() -> None:
    shown = Shown(100)
    for step in range(1, 4):
        shown.write(f"line {step}\n")
        shown.show(step)
    found = shown.screen.text()
    assert (
        found[:3] == ["line 1", "line 2", "line 3"] and "step 3/800" in found[3] and len(found) == 6
    )
    shown.screen.feed(shown.bar.leave_on_screen())
    shown.screen.feed("last\n")
    assert [text[:8] for text in shown.screen.text()] == [
        "line 1",
        "line 2",
        "line 3",
        "epoch 2/",
        "1,234 sa",
        "accuracy",
        "last",
        "",
    ]
    assert shown.bar.erase_bar() == shown.bar.leave_on_screen() == ""


def test_a_status_is_laid_out_once_however_much_is_written_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown, made = Shown(100), list[int]()
    monkeypatch.setattr(
        live_bar,
        "draw_status",
        lambda status, *args, **options: (
            made.append(status.step) or draw_status(status, *args, **options)
        ),
    )
    for step in (1, 2):
        shown.show(step)
        for _ in range(5):
            shown.write("text\n")
        assert (
            shown.screen.text()[5 * step - 1] == "text"
            and f"step {step}/800" in shown.screen.text()[5 * step]
        )
    shown.screen.resize(50)
    shown.write("text\n")
    assert made == [1, 2, 2] and all(len(row) < 50 for row in shown.screen.rows()[11:])


def test_a_line_under_way_is_ended_where_its_program_does_not_draw_it_again() -> None:
    shown = Shown(100)
    shown.write("loading")
    shown.show(1)
    assert shown.screen.text()[0] == "loading" and "step 1" in shown.screen.text()[1]
    shown.write("done\n")
    assert shown.screen.text()[:2] == ["loading", "done"] and "step 1" in shown.screen.text()[2]
    for percent in (1, 2):
        shown.write(f"\r{percent} %")
        shown.show(percent)
        assert shown.screen.text() == ["loading", "done", f"{percent} %"]
    shown.write("\n")
    assert "step 2" in shown.screen.text()[3]


STEPS = st.one_of(
    st.text(st.sampled_from("ab\n"), max_size=60),  # text, in pieces
    st.integers(1, 800),  # a step to show
    st.sampled_from([8.0, 21.0, 40.0, 80.0, 131.0]),  # another width
)


@settings(deadline=None, max_examples=150)
@given(st.lists(STEPS, max_size=20))
def test_text_stays_as_it_was_written(steps: list[object]) -> None:
    """Lines that were under way when the bar came are ended, and nothing else is changed."""
    shown = Shown(lines=100)  # what has scrolled away can't be taken away
    for step in steps:
        if isinstance(step, str):
            shown.write(step)
        elif isinstance(step, int):
            shown.show(step)
        else:
            assert isinstance(step, float)
            shown.screen.resize(int(step))
            shown.above.resize(int(step))
    shown.screen.feed(shown.bar.erase_bar())
    assert "".join(shown.screen.text()) == "".join(shown.above.text())
