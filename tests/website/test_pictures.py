"""Pictures of the concept pages: what is checked in is what the code draws today."""

from __future__ import annotations

import re
from math import inf
from xml.etree import ElementTree

import pytest

from paceline.comm.schedule import SCHEDULES
from paceline.parallel.pipelining import schedules
from tests.harness.documents import DOCS, PAGES, links, text
from website.pictures import all_reduce, pipelines, sharding, staleness, svg
from website.pictures.__main__ import drawn


def test_what_is_checked_in_is_what_is_drawn() -> None:
    there = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert there == drawn(), "python -m website.pictures draws them again"


def test_every_picture_is_on_a_page() -> None:
    shown = {
        link.rpartition("/")[2]
        for page in PAGES
        for link in links(text(page))
        if link.endswith((".svg", ".png"))
    }
    assert {
        path.name for path in (DOCS / "pictures").iterdir() if path.suffix in (".svg", ".png")
    } == shown


@pytest.mark.parametrize("name", sorted(drawn()))
def test_pictures_are_whole_and_nothing_leaves_them(name: str) -> None:
    root = ElementTree.fromstring(drawn()[name])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, wide, high = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width and 0 <= y <= y + high <= height
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", drawn()[name])  # nothing is fetched


def test_all_schedules_are_drawn() -> None:
    assert set(all_reduce.SHOWN) == set(SCHEDULES)
    assert all(f">{name}<" in pipelines.picture() for name in schedules.SCHEDULES)


def test_every_rank_ends_with_the_whole_sum_in_the_picture() -> None:
    picture = all_reduce.picture("ring", "3")
    # as many moves as the schedule has of each kind
    assert picture.count('class="to-blue"') == picture.count('class="to-green"') == 6
    last = 26 + all_reduce.ROUND * 4
    # three chunks of three ranks
    assert len(re.findall(rf'y="{last:g}"[^/]*class="green"', picture)) == 9


def test_staleness_bounds_what_is_drawn() -> None:
    """Replayed from the turns that are drawn, without the clocks that have drawn them."""
    for bound in (0.0, 2.0, inf):
        leads = [0]
        for worker, turn, begin, _ in staleness.turns(bound):
            others = [
                sum(end <= begin for who, _, _, end in staleness.turns(bound) if who == other)
                for other in range(staleness.WORKERS)
            ]
            assert others[worker] == turn
            leads.append(turn - min(others))
        assert max(leads) == (bound if bound < inf else 4)


def test_pieces_add_up_to_a_whole() -> None:
    assert [sum(sharding.held(zero).values()) for zero in range(4)] == [16, 10, 7, 4]


def test_what_is_written_is_escaped() -> None:
    drawing = svg.Drawing("a < b")
    drawing.say(0, 10, "1 < 2 & 3")
    drawing.arrow((0, 0), (10, 0), "to-blue")
    drawing.rule((0, 0), (20, 0))
    assert (
        next(each.text for each in ElementTree.fromstring(drawing.text()) if each.text) == "a < b"
    )
