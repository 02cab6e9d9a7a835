"""Messages on parameters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.servers.protocol import parameters
from tests.harness.messages import check, drawn, messages


@pytest.mark.parametrize("kind", messages(parameters), ids=lambda kind: kind.__name__)
@settings(max_examples=10)
@given(data=st.data())
def test_come_as_they_were_sent_and_nothing_else_is_taken_for_them(kind: Any, data: Any) -> None:
    check(data.draw(drawn(kind)))
