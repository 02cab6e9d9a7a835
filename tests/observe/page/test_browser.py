"""A page in a real browser: nothing goes wrong, nothing is asked of a network, figures are the
summary's, and curves tell their values.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.observe.page.data import make_page_data
from paceline.observe.page.document import render_page
from tests.harness.jobs import PATIENCE
from tests.harness.page_runs import whole
from tests.harness.pages import Tags, compare_figures

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
POINT = """
document.fonts.ready.then(() => {
  const sheet = document.querySelector("#loss .sheet"), box = sheet.getBoundingClientRect();
  const there = {clientX: box.left + box.width / 2, clientY: box.top + 9, bubbles: true};
  sheet.dispatchEvent(new PointerEvent("pointermove", there));
  document.body.dataset.told = document.querySelector("#loss .read-out").textContent;
  document.body.style.width = "360px";  // windows of Chromium have 500 pixels at least, where the style for phones begins at 544
  document.body.dataset.wide = document.body.scrollWidth > 360 ? "yes" : "no";
});
"""  # noqa: E501


@pytest.mark.jobs
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
def test_a_page_in_a_browser(tmp_path: Path) -> None:
    folder, out = whole(tmp_path), tmp_path / "page.html"
    out.write_text(render_page([make_page_data(folder)], script=POINT), encoding="utf-8")
    quiet = (
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    )
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        *quiet,
        "--enable-logging=stderr",
        "--window-size=360,800",
    ]
    command += [
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        out.as_uri(),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    # the page forbids itself what isn't in it, and a browser says so of each request that it
    # refuses
    assert [line for line in found.stderr.splitlines() if "CONSOLE" in line] == []
    assert compare_figures(found.stdout, [json.loads((folder / "summary.json").read_text())]) > 80
    body = next(given for tag, given in Tags(found.stdout).found if tag == "body")
    assert body["data-wide"] == "no"  # a phone needn't scroll sideways
    assert (body["data-told"] or "").splitlines() == ["step 30, 3 s", "loss 0.5477"]
