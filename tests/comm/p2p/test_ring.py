from __future__ import annotations

import random
import threading

import pytest

from paceline.comm.p2p.ring import CAPACITY, CELLS, RingEntry, RingReader, RingWriter
from paceline.comm.shm.shared_segment import SharedSegment
from paceline.errors import ResourceError
from tests.harness.jobs import PATIENCE


def ends() -> tuple[RingWriter, RingReader]:
    table = SharedSegment.create(2 * CELLS)
    return RingWriter(table, CELLS, SharedSegment.create), RingReader(table, CELLS)


def taken_from(reader: RingReader) -> RingEntry | None:
    found = reader.next_entry()
    if found is not None:
        reader.confirm_entry()
    return found


def entry(number: int) -> RingEntry:
    return RingEntry(
        number,
        number * 3,
        number << 40,
        number + 1,
        number % 7,
        f"/proc/{number}/fd/3" if number % 2 else "",
    )


def test_entries_come_in_order_whether_they_are_read_early_or_late() -> None:
    writer, reader = ends()
    dice, posted, taken = random.Random(1), 0, 0
    assert reader.next_entry() is None and not writer.has_pending
    for _ in range(60):
        for _ in range(dice.choice((1, 3, CAPACITY, 5 * CAPACITY))):
            writer.post_entry(entry(posted))
            posted += 1
        assert writer.has_pending
        for _ in range(dice.choice((0, 2, posted - taken))):
            if taken < posted:
                assert taken_from(reader) == entry(taken)
                taken += 1
    while taken < posted:
        assert taken_from(reader) == entry(taken)
        taken += 1
    assert reader.next_entry() is None and not writer.has_pending


def test_a_writer_never_waits_for_its_reader() -> None:
    writer, reader = ends()
    for number in range(100 * CAPACITY):
        writer.post_entry(entry(number))
    for number in range(100 * CAPACITY):
        assert taken_from(reader) == entry(number)


def test_a_sleeping_reader_is_woken() -> None:
    writer, reader = ends()
    found: list[RingEntry] = []

    def read() -> None:
        while len(found) < 500:
            got = taken_from(reader)
            if got is None:
                reader.sleep_until_posted(PATIENCE)
            else:
                found.append(got)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    for number in range(500):
        writer.post_entry(entry(number))
    thread.join(PATIENCE)
    assert found == [entry(number) for number in range(500)]


def test_entries_whose_writer_has_gone_unread_are_named() -> None:
    writer, reader = ends()
    writer.post_entry(entry(0))
    writer.close()
    with pytest.raises(ResourceError, match="can't be mapped"):
        reader.next_entry()


def test_an_entry_is_pending_until_it_is_confirmed() -> None:
    writer, reader = ends()
    writer.post_entry(entry(4))
    # what it tells of may not be mapped yet
    assert reader.next_entry() == reader.next_entry() == entry(4) and writer.has_pending
    reader.confirm_entry()
    assert not writer.has_pending and reader.next_entry() is None
