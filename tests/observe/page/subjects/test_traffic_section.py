"""Bytes within and between hosts, by worker and by axis; links, codecs and servers where there
are.
"""

from __future__ import annotations

from pathlib import Path

from paceline.observe.page.data import make_page_data
from paceline.observe.page.subjects import traffic_section
from tests.harness.finished_runs import finished
from tests.harness.page_runs import whole
from tests.harness.pages import tree


def test_all_that_is_known(tmp_path: Path) -> None:
    server = {
        "busy_seconds": 1.0,
        "bytes": 5e6,
        "bytes_sent": 1e6,
        "memory_bytes": 1e6,
        "put_off": 0,
    }
    text = traffic_section.draw_traffic(make_page_data(whole(tmp_path, servers=[server])))
    assert text is not None
    titles = [title.text or "" for title in tree(f"<div>{text}</div>").iter("h3")]
    assert [title.split(":")[0] for title in titles] == [
        *(
            "Sent by all workers together in a step",
            "Over the run",
            "For each worker",
            "Along the axes of the mesh",
        ),
        *("Links that became slow", "Codecs", "Servers"),
    ]
    assert (
        "16 Mbit/s" in text
        and "800 Mbit/s" in text
        and "int8() sent a quarter." in text
        and "5.0 MB received" in text
    )


def test_one_worker_sends_nothing(tmp_path: Path) -> None:
    assert (
        traffic_section.draw_traffic(
            make_page_data(finished(tmp_path, bytes_sent={"within": 0.0, "between": 0.0}))
        )
        is None
    )
