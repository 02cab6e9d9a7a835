"""A record travels as a row, and arrives with all of its fields."""

from __future__ import annotations

import msgpack
import pytest

from paceline.record.logged.record import LogRecord


@pytest.mark.parametrize(
    "record",
    [
        LogRecord(
            7,
            1007,
            1.5,
            32,
            [0.1, 0.2, 0.3, 0.4],
            {"loss": [6.0, 3.0]},
            [1, 2, 3, 4],
            [100, 0],
            {"accuracy": b"\x00state"},
        ),
        LogRecord(8, 1007, 1.75, 0, None, {}, None, None, {}),
    ],
)
def test_it_travels(record: LogRecord) -> None:
    row = msgpack.unpackb(msgpack.packb(record))
    assert isinstance(row, list) and LogRecord(*row) == record
