"""Every cause has its word, and those that are measured have a remedy of their own."""

from __future__ import annotations

from paceline.trace import MEASURED_CAUSES
from paceline.unequal.stragglers.causes import CAUSES, REMEDIES, WORDS


def test_every_cause_has_a_word_and_what_is_measured_a_remedy_of_its_own() -> None:
    assert [*WORDS] == [*CAUSES] and [*REMEDIES] == [*MEASURED_CAUSES]
    assert len({*WORDS.values()}) == len(CAUSES) and len({*REMEDIES.values()}) == len(
        MEASURED_CAUSES
    )
