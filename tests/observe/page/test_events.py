"""Events are known by what they say of themselves, or by the words that runs use."""

from __future__ import annotations

import pytest

from paceline.observe.page.events import EVENT_KINDS, classify_event


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("rank 3 was lost: 3 workers went on after 0.21 s (view 2)", "lost"),
        ("ranks 1, 2 were lost: 1 worker went on after 0.2 s (view 2)", "lost"),
        ("rank 3 has come: 4 workers go on (view 3)", "came"),
        (
            (
                "shares are now 40 + 24: rank 1 takes 1.7 times as long for a sample; "
                "step 20 ms, 30 before"
            ),
            "shares",
        ),
        (
            (
                "rank 2 on B was late in 3 looks in a row, for compute: it leaves, and its samples "
                "are dealt to the others"
            ),
            "evicted",
        ),
        (
            "rank 1 on B makes the others wait: 12.0 ms in each step, 20% of it, for compute.",
            "evicted",
        ),
        ("codec: int8() 1.4 times as fast, which is taken from step 40 on", "codec"),
        (
            "exchanges take 9.0 ms of a step instead of 4.0 ms: the link of B carries 8 Mbit/s",
            "link",
        ),
        ("saved step-00000004", "checkpoint"),
        ("stopped: loss was nan first on rank 1, at step 4", "fault"),
        ("the script has something to say", "other"),
    ],
)
def test_words(what: str, found: str) -> None:
    assert classify_event({"what": what}) == found and found in EVENT_KINDS


def test_what_an_event_says_of_itself() -> None:
    assert classify_event({"what": "kill(rank=3, step=90)", "event": "fault"}) == "fault"
    assert classify_event({"what": "saved x", "event": "of another version"}) == "checkpoint"
