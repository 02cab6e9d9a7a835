"""A real notebook in a fresh kernel; and the bar of its progress by itself."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import uuid
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from paceline.notebook.notebook import NotebookBar, draw_html, is_notebook_kernel
from paceline.record.status_line import FinishedStep
from paceline.unequal.stragglers.lateness import RankLateness
from tests.harness import short_timings
from tests.harness.jobs import MARK, PATIENCE, Jobs, wait_for

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
SECONDS = {"compute": 0.6, "exchange": 0.2, "wait": 0.2, "data": 0.0}


class Handle:
    """What `display` gives, and what was shown with it."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def __call__(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw and display_id
        self.shown.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(bundle)


def test_the_bar() -> None:
    handle = Handle()
    bar = NotebookBar(handle)
    bar.step(FinishedStep(10, 1.0, 640, {"loss": 0.5}, SECONDS), 40)
    bar.late(RankLateness(1, {"compute": 0.5}), "<host>", 1.0)
    bar.remark("resumed")
    bar.step(FinishedStep(20, 2.0, 640, {"loss": 0.25}, SECONDS), 40)
    bar.close(40)
    first, second = handle.shown
    assert (
        first["text/plain"]
        == "step 10/40  loss 0.5  640 samples/s  compute 60% exchange 20% wait 20% data 0%"
    )
    assert second["text/plain"].startswith("step 20/40  loss 0.25") and second[
        "text/plain"
    ].endswith("compute  resumed")
    assert "0:02 left  rank 1 on <host> late 50%" in second["text/plain"]
    assert (
        '<progress value="20" max="40"' in second["text/html"]
        and "&lt;host&gt;" in second["text/html"]
    )
    bar.logged(20, {"val/accuracy": 0.5})
    assert handle.shown[-1]["text/plain"] == second["text/plain"] + "\nstep 20  val/accuracy 0.5"
    assert (
        handle.shown[-1]["text/html"].startswith(second["text/html"])
        and "val/accuracy 0.5" in handle.shown[-1]["text/html"]
    )
    assert re.findall(r'title="(\w+ \d+%)"', first["text/html"]) == [
        "compute 60%",
        "exchange 20%",
        "wait 20%",
        "data 0%",
    ]


def test_a_bar_without_an_end_or_a_time() -> None:
    text = draw_html(FinishedStep(3, 1.0, 0, {}, dict.fromkeys(SECONDS, 0.0)), None, "step 3")
    assert "<progress  style" in text and "title" not in text and "step 3" in text


def test_this_process_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_notebook_kernel()
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert not is_notebook_kernel()


WAITING = """
def forever():
    import os, pathlib, time
    pathlib.Path(f"waits-{os.environ['RANK']}").touch()
    time.sleep(600)

pl.launch(forever)
"""


def shown(cell: Any, kind: str) -> str:
    """What a cell has written to stdout or stderr."""
    return "".join(
        each["text"]
        for each in cell["outputs"]
        if each["output_type"] == "stream" and each["name"] == kind
    )


async def run_all(client: NotebookClient, folder: Path) -> None:
    """Execute the notebook; then launch what never ends, and interrupt the kernel once both
    workers are there.
    """
    async with client.async_setup_kernel():
        for index, cell in enumerate(client.nb.cells):
            await client.async_execute_cell(cell, index)
        client.nb.cells.append(nbformat.v4.new_code_cell(WAITING))
        waiting = asyncio.create_task(
            client.async_execute_cell(client.nb.cells[-1], len(client.nb.cells) - 1)
        )
        async with asyncio.timeout(PATIENCE):
            while not all((folder / f"waits-{rank}").exists() for rank in range(2)):
                assert not waiting.done(), waiting.exception()
                await asyncio.sleep(0.05)
            await client.km.interrupt_kernel()
            with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
                await waiting


@pytest.mark.jobs
def test_the_example_in_a_fresh_kernel(job: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have different samples and come to the same weights; output, progress and errors
    are in the cells; an interrupt ends all.
    """
    mark = uuid.uuid4().hex
    given = {
        **short_timings.environ(),
        MARK: mark,
        "TMPDIR": str(job.temporary),
        "IPYTHONDIR": str(job.folder / "ipython"),
    }
    for name, value in {
        **given,
        "JUPYTER_RUNTIME_DIR": str(job.folder / "runtime"),
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=PATIENCE,
        kernel_name="python3",
        resources={"metadata": {"path": str(job.folder)}},
    )
    asyncio.run(run_all(client, job.folder))
    launched, compared, failed = [cell for cell in notebook.cells if cell.cell_type == "code"][2:5]
    seen = re.findall(
        r"^\[([01])\] worker \1 of 2 has seen (\d+) samples$",
        shown(launched, "stdout"),
        re.MULTILINE,
    )
    assert (
        sorted(rank for rank, _ in seen) == ["0", "1"]
        and sum(int(count) for _, count in seen) == 2 * 4096
    )
    assert "[0] paceline: 2 workers on 1 host" in shown(
        launched, "stderr"
    ) and "[0] step" not in shown(launched, "stderr")
    (bar,) = [each["data"] for each in launched["outputs"] if each["output_type"] == "display_data"]
    assert (
        bar["text/plain"].startswith("epoch 2/2  step 128/128  loss ")
        and '<progress value="128" max="128"' in bar["text/html"]
    )
    assert re.fullmatch(
        r"accuracy 0\.9\d, the same on both workers: True\n", shown(compared, "stdout")
    )
    assert shown(failed, "stdout").startswith("rank 1 failed: ValueError: no such luck")
    assert 'raise ValueError("no such luck")' in shown(failed, "stdout")  # the line of the cell
    wait_for(lambda: not marked(mark))


def marked(mark: str) -> list[psutil.Process]:
    """All processes with this mark, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(MARK) == mark
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found
