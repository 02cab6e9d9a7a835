"""What a live page shows of a run's folder, and that drawing its report takes little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.observe.watch import source
from paceline.observe.watch.source import DRAWING_SHARE, MAX_DRAWING_INTERVAL, RunPage
from paceline.record.folder import RunFolder
from paceline.record.live import LiveRecord
from tests.harness.clocks import Clock
from tests.harness.live_runs import PARTS, facts


def write(folder: Path, steps: int) -> None:
    """A run that has taken so many steps."""
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        done = (folder / "metrics.jsonl").read_text().count("\n")
        for step in range(done + 1, steps + 1):
            file.write(
                json.dumps(
                    {
                        "step": step,
                        "time": step / 10,
                        "loss": 3 / step,
                        "samples": 64,
                        "seconds": PARTS,
                    }
                )
                + "\n"
            )
    LiveRecord(
        RunFolder(folder), lambda: True, lambda: facts(steps=steps, live={"step": steps}), print
    ).update_file()


def test_the_moment_and_the_report(tmp_path: Path) -> None:
    write(tmp_path / "mine", 40)
    page = RunPage(tmp_path / "mine")
    found = page.read_sections()
    assert (
        next(iter(found)) == "now"
        and "40 of 100" in found["now"]
        and '<section id="loss">' in found["loss"]
    )
    text = page.render_document()
    assert found["loss"] in text and "new EventSource" in text.rpartition("<script>")[2]
    # it asks nobody for anything
    assert "http://" not in text.replace("http://www.w3.org/", "") and "https://" not in text


def test_a_run_under_way_is_shown_once(tmp_path: Path) -> None:
    write(tmp_path / "mine", 40)
    found = "".join(RunPage(tmp_path / "mine").read_sections().values())
    assert (
        "running" in found
        and "has not ended" not in found
        and "<dt>loss</dt>" in found
        and found.count("<dt>workers</dt>") == 1
    )
    LiveRecord(RunFolder(tmp_path / "mine"), lambda: True, facts, print).record_failure(
        ValueError, ValueError("no")
    )
    found = "".join(RunPage(tmp_path / "mine").read_sections().values())
    assert found.count("failed at step 40: ValueError: no") == 1 and "running" not in found


def test_before_a_run_is_known_and_when_another_begins(tmp_path: Path) -> None:
    page = RunPage()
    page.show_line("rank 1 failed")
    assert (
        "waiting for the workers" in page.read_sections()["now"]
        and "rank 1 failed" in page.read_sections()["now"]
    )
    before = page.layout_key
    assert "new EventSource" in page.render_document()
    for name in ("one", "two"):
        write(tmp_path / name, 40)
        page.follow_run(tmp_path / name)
        page.follow_run(tmp_path / name)  # told again, as by another start of the job
        assert name in page.read_sections()["now"] and name in page.render_document()
        assert page.layout_key != before
        before = page.layout_key


def test_the_moment_is_made_each_time_and_the_report_as_often_as_it_is_cheap(
    tmp_path: Path,
) -> None:
    clock, spent = Clock(), Clock()
    write(tmp_path, 40)
    page = RunPage(tmp_path, clock=clock, spent=spent)
    drawn: list[float] = []
    original = source.sections

    def sections(datas: object) -> dict[str, str]:
        drawn.append(clock.now)
        spent.now += 0.02
        return original(datas)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "sections", sections)
        for second in range(12):
            write(tmp_path, 41 + second)
            assert f"{41 + second} of 100" in page.read_sections()["now"]
            clock.now += 1
        # 20 ms each: a two-hundredth of the time
        assert [at - drawn[0] for at in drawn] == [0, 4, 8]
        assert 0.02 / DRAWING_SHARE == 4
        spent.now += 1000 * DRAWING_SHARE
        (tmp_path / "live.json").unlink()
        (tmp_path / "summary.json").write_text(
            json.dumps({key: value for key, value in full().items() if key != "live"})
        )
        page.read_sections()
        assert len(drawn) == 4  # at the end at once
        assert MAX_DRAWING_INTERVAL >= 10


def full() -> dict[str, object]:
    """The fields of a summary, as far as a report needs them."""
    return facts(
        bytes_sent={"within": 0.0, "between": 0.0}, codecs=[], parameters_sha256="", checkpoints={}
    )


def test_a_damaged_file_is_said_on_the_page(tmp_path: Path) -> None:
    write(tmp_path, 40)
    (tmp_path / "metrics.jsonl").write_text("nonsense\nnonsense\n")
    found = RunPage(tmp_path).read_sections()
    assert "metrics.jsonl is damaged in line 1" in found["problem"] and "40 of 100" in found["now"]
