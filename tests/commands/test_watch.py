"""`paceline watch` and `--watch` on the command line: mistakes are one line each, before
anything is started.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.cluster.launcher import launch
from paceline.lab import terminal
from paceline.observe.watch import address
from paceline.observe.watch.address import WatchAddress


@pytest.fixture(autouse=True)
def _nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> int:
        raise AssertionError("it was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run_job", started)
    monkeypatch.setattr(terminal, "run_in_lab", started)
    Path("train.py").touch()


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `paceline WORDS` says when it ends with 2."""
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


STARTS = (["run", "--watch"], ["lab", "run", "two-hosts", "--watch"])


@pytest.mark.parametrize("words", STARTS)
def test_an_address_that_is_none(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = call(monkeypatch, capsys, *words, "x", "train.py")
    assert said == (
        "paceline: --watch x isn't [HOST:]PORT, such as 8080 or 0.0.0.0:8080 (port 0 is any "
        "that is free)\n"
    )


@pytest.mark.parametrize("words", STARTS)
def test_a_port_in_use(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with WatchAddress.parse_address("0", "--watch").open_socket() as taken:
        port = taken.getsockname()[1]
        said = call(monkeypatch, capsys, *words, str(port), "train.py")
    assert (
        said.startswith(f"paceline: no page can be served for --watch: port {port} is in use")
        and said.count("\n") == 1
    )


@pytest.mark.parametrize(
    "words", [*([*words, "0", "train.py"] for words in STARTS), ["watch", "x"]]
)
def test_a_missing_library(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    said = call(monkeypatch, capsys, *words)
    assert said == (
        "paceline: a live page needs aiohttp, which is not installed: "
        "pip install 'paceline[watch]'\n"
    )


def test_a_folder_that_is_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, capsys, "watch").startswith("paceline: there are no runs in ")
    assert call(monkeypatch, capsys, "watch", "none").startswith(
        "paceline: there is no run folder none"
    )
