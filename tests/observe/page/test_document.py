"""A page is one file that asks nobody for anything, and runs nothing that a run has named."""

from __future__ import annotations

import json
import re
from pathlib import Path

from paceline.observe.page.data import make_page_data
from paceline.observe.page.document import render_page
from paceline.record.folder import RunFolder
from tests.harness.pages import Tags

BAD = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def test_a_page_is_one_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a <b> & c")
    folder.path.mkdir()
    split = {"compute": 0.1, "exchange": 0.0, "wait": 0.0, "data": 0.0}
    lines = (
        {
            "step": step,
            "time": 0.1 * step,
            "samples": 8,
            "seconds": split,
            "loss": 1 / step,
            BAD: step,
        }
        for step in range(1, 30)
    )
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = render_page([make_page_data(folder)], head="<!-- more -->", script="/* mine */")
    assert text.startswith("<!doctype html>")
    assert "<title>a &lt;b&gt; &amp; c - paceline</title>" in text
    assert "<!-- more -->" in text and "/* mine */</script>" in text
    names = Tags(text).names
    assert names.count("script") == 1
    assert not {"img", "link", "iframe", "object"} & set(names)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    assert "default-src 'none'" in text
