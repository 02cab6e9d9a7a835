"""Texts that are much too long, too deep or too large, and files of runs that somebody has made up: each is refused in one of our errors."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import notation
from paceline.cluster import mesh, topology_file
from paceline.cluster.launcher.request import meeting_point
from paceline.cluster.topology import Device, DeviceSpeed, HostLink, HostRanks, Interface, Topology
from paceline.errors import PacelineError, UsageError
from paceline.observe.cluster import describe
from paceline.observe.page.data import page_data
from paceline.observe.report import LISTED, report
from paceline.observe.watch.address import WatchAddress
from paceline.session.probe.cluster_file import ClusterFile
from paceline.session.record.folder import KINDS
from paceline.session.trackers import catalogue
from tests.harness.finished_runs import finished

COUNTS = (49, 300, 5000, 50_000)
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 0.5, 10**9, 10**18, 1 << 70, 10**400, 1e308, -1e308, float("nan"), float("inf"), "nan", "inf", "", "x"),
    *("9" * 5000, "1e309", "\x1b[31m", "\ud800", "²", [], {}, [[]], {"a": 1}, [1] * 5, [None], {"step": 1}),
]
READERS: dict[str, Callable[[str], object]] = {
    "sync": notation.strategy,
    "cut": notation.cuts,
    "shares": lambda text: notation.shares(text, 2),
    "mesh": lambda text: mesh.lay_out(mesh.read(text), Topology((HostRanks("a", (0, 1), "10.0.0.1"),))),
    "join": meeting_point,
    "watch": lambda text: WatchAddress.parse(text, "--watch"),
    "report-to": lambda text: catalogue.make(catalogue.read(text)),
    "cluster.json": topology_file.load,
}


def texts() -> Iterator[str]:
    for count in COUNTS:
        for left, right in ("()", "[]", "{}", ("shard(", ")"), ("AllReduce(codec=", ")"), ("tensor({'a':", "})"), ('{"a":', "}")):
            yield from (left * count + right * count, left * count)
        for word in ("-", "not ", "lambda: ", "1+", "a.", ",", ":", "data=2,", "shard('a'),", "prometheus,", "9", "²", "a", "\n"):
            yield from (word * count, word * count + "1")
        for call in ("Sequence({})", "AllReduce({})", "LocalSGD({})", "tensor({{{}}})"):
            yield from (call.format(", ".join([part] * count)) for part in ("AllReduce()", "a=1", "'a': column()", "1"))
        digits = "9" * count
        for number in (
            "LocalSGD({})",
            "LocalSGD(-{})",
            "ParameterServer(staleness={})",
            "AllReduce(codec=topk({}))",
            "shard('a', zero={})",
        ):
            yield from (number.format(each) for each in (digits, f"0x{digits}", f"{digits}.0", "1e999", "inf"))
        yield from (before + digits for before in ("data=", "localhost:", "localhost:-", "prometheus:", "prometheus:x:", ":", "[::1]:"))
    yield from (
        "\0",
        "\ud800",
        "",
        "\t(",
        "1j",
        "tensor({[]: column()})",
        "tensor({column(): column()})",
        "Sequence((1,),(2,))",
        "prometheus:²",
    )


@pytest.mark.parametrize("option", READERS)
def test_any_text_of_an_option_is_read_or_refused(option: str) -> None:
    refused = 0
    for text in texts():
        try:
            READERS[option](text)
        except PacelineError:
            refused += 1
    assert refused > len([*texts()]) / 3


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Everything in a tree, with what it lies in."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from places(node[key])


def made_up(good: dict[str, Any], count: int) -> Iterator[str]:
    """The same with other things in it somewhere, as JSON."""
    draw = random.Random(22)
    for _ in range(count):
        bad = copy.deepcopy(good)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            within, key = draw.choice([*places(bad)] or [(bad, "x")])
            if draw.random() < 0.15:
                within.pop(key)
            else:
                within[key] = copy.deepcopy(draw.choice(ODD))
        yield json.dumps(bad)


def summary() -> dict[str, Any]:
    """The fields of a summary that has everything."""
    bytes_of = dict.fromkeys(KINDS, 7)
    served = {"name": "s", "busy_seconds": 1.0, "bytes": 1, "bytes_sent": 1, "memory_bytes": 1, "put_off": 1, "staleness": {"0": 1, "1": 4}}
    link = {"step": 1, "words": "w", "advice": "a", "hosts": ["a", "b"], "rate": 1.0, "usual": 2.0, "gain": 1.0}
    return {
        "mesh": {"data": 2},
        "places": [{"data": 0}, {"data": 1}],
        "axes": {"data": {"seconds": 0.1, "within": 1, "between": 1}},
        "memory": [{"predicted": bytes_of, "measured": bytes_of, "peak": 3}] * 2,
        "loader": {"num_workers": 2, "shares": [3, 3]},
        "links": [link],
        "untold": ["reading"],
        "servers": [served | {"steps_by_workers": {"2": 3}, "dropped": {"gradients": 1, "samples": 2, "dealt_again": 1}}],
        "events": [{"time": 1.0, "what": "x"}],
        "saves": [{"time": 1.0, "what": "saved", "step": 1}],
    }


def test_a_summary_that_is_made_up_is_told_or_refused(tmp_path: Path) -> None:
    folder = finished(tmp_path, work=[{"seconds": 0.1, "late": 0.1}] * 2, late=[{"reading": 0.1}] * 2)
    good = json.loads((folder / "summary.json").read_text()) | summary()
    (folder / "summary.json").write_text(json.dumps(good))
    assert "data 0" in report(folder) and page_data(folder)["ranks"] == ["rank 0 (data 0)", "rank 1 (data 1)"]
    for text in made_up(good, 1000):
        (folder / "summary.json").write_text(text)
        for read in (report, page_data):
            try:
                found = read(folder)
            except PacelineError:
                continue
            assert isinstance(found, dict) or found.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "fields",
    [
        {"workers": 10**9},
        {"workers": 10**9, "mesh": {"data": 10**9}, "places": [{"data": 0}]},
        {"events": [{"time": 1.0, "what": "x"}] * 200_000},
    ],
)
def test_a_summary_of_more_than_can_be_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = finished(tmp_path)
    (folder / "summary.json").write_text(json.dumps(json.loads((folder / "summary.json").read_text()) | fields))
    for read in (report, page_data):
        with pytest.raises(UsageError, match="is damaged"):
            read(folder)


def test_many_events_are_told_in_short(tmp_path: Path) -> None:
    folder = finished(tmp_path, events=[{"time": float(at), "what": f"event {at}"} for at in range(LISTED + 5)])
    assert (
        "event 4\n" not in report(folder)
        and f"event {LISTED + 4}" in report(folder)
        and f"the last {LISTED} of {LISTED + 5}" in report(folder)
    )


def test_what_moves_the_cursor_of_a_terminal_is_written_out(tmp_path: Path) -> None:
    text = report(finished(tmp_path, events=[{"time": 1.0, "what": "\x1b]0;title\x07 and \x9b2J"}]))
    assert r"\x1b]0;title\x07 and \x9b2J" in text and text.replace("\n", "").isprintable()


DEVICE = Device("cpu", 0, "some", 8, 4, 2, (DeviceSpeed("float32", 1e9, 0.1),), 2e9, 1.9, 2e9, 3e9, "performance")
INTERFACE = Interface("eth0", "10.0.0.1", "10.0.0.0/24", 1e9)
HOSTS = (HostRanks("a", (0, 2), "10.0.0.1", 4, (DEVICE, DEVICE), 1.5, "m", 8, (INTERFACE,)), HostRanks("b", (1,), "10.0.0.2"))
MEASURED = Topology(HOSTS, (HostLink(0, 1, 1e-4, 1.25e8, 6e7), HostLink(1, 0, 1e-4, 1.2e8), HostLink(0, 0, 1e-5, 1e9)))


def test_a_measured_cluster_that_is_made_up_is_used_or_refused() -> None:
    for text in made_up(json.loads(topology_file.dump(MEASURED)), 1000):
        try:
            found = topology_file.load(text)
            describe(found)
            found.speeds()
            ClusterFile(found, "x.json").check(MEASURED)
            ClusterFile(found, "x.json").facts(MEASURED)
        except PacelineError:
            continue
