"""Jobs in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launches import Jobs, jobs


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Jobs]:
    with jobs(tmp_path) as found:
        yield found
