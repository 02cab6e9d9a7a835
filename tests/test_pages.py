"""Every block of code on every page runs, or says why it doesn't; links lead somewhere; the site
has every page.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import lab
from paceline.lab.kernel import find_missing
from tests.harness import documents as pages
from tests.harness import nursery
from tests.harness.documents import PAGES, Block
from tests.harness.jobs import PATIENCE, PRELOADED, ROOT, Jobs, jobs
from website import commands, examples, names
from website.sources import OUTSIDE

MARKS = {  # what is done with a block that isn't simply run: for which reasons
    "not run": {  # but its commands are parsed, and its Python compiles
        "a part of a script",
        "needs another machine",
        "needs GPUs",
        "needs Slurm",
        "needs Kubernetes",
        "needs Ray",
        "needs a library of the bridges, which tests/bridges runs",
        "another launcher, which tests/cluster starts",
        "installs for minutes, as CI does in a fresh clone",
        "trains for minutes",
        "measures for minutes",
        "runs tests",
        "opens a shell",
    },
    "on two hosts": {"of a lab, with the address of the first"},
    "fails": {"as it says"},
}
LANGUAGES = {"python", "py", "console", "bash", "text", "json", "toml", "yaml", ""}
# what several pages have in the same words, over the same files, and nothing on these pages reads:
# the first page runs it
ELSEWHERE = {
    "paceline lab run two-hosts examples/train.py",
    "paceline run --workers 2 --watch 8080 examples/train.py",
    "paceline probe --workers 2",
}
MEETING = "10.0.0.1"  # where pages have hosts meet


def all_blocks() -> Iterator[tuple[str, Block]]:
    for page in PAGES:
        for block in pages.blocks(page):
            yield pages.name(page), block


def test_blocks_that_are_not_run_say_why() -> None:
    unknown = [
        (page, block.mark)
        for page, block in all_blocks()
        if block.mark and block.marked[1] not in MARKS.get(block.marked[0], ())
    ]
    assert unknown == []
    silent = [
        (page, block.body)
        for page, block in all_blocks()
        if block.language in ("py", "bash") and block.marked[0] != "not run"
    ]
    assert silent == [], (
        "```python and ```console are run; what can't be has the line <!-- not run: "
        "why --> before it"
    )


def test_blocks_are_fenced_and_have_a_language() -> None:
    assert [
        (page, block.language) for page, block in all_blocks() if block.language not in LANGUAGES
    ] == []
    for page in PAGES:
        outside = pages.BLOCK.sub("", pages.text(page))
        assert not re.search(r"^```", outside, re.MULTILINE), (
            f"{page}: a fence that isn't closed, or isn't at the beginning of its line"
        )
        assert not re.search(r"(?<=\n\n)    \S", outside), (
            f"{page}: code without a fence, of which nobody knows whether it runs"
        )


def test_what_a_block_is() -> None:
    page = (
        "Save it as `a.py`:\n\n<!-- not run: needs GPUs -->\n```python\nx\n```\n\n```console\n$ "
        "paceline lab run a  # so\nout\n```\n"
    )
    first, second = pages.parse(page)
    assert (first.name, first.marked, first.body) == ("a.py", ("not run", "needs GPUs"), "x\n")
    assert (second.name, second.mark, second.commands, second.output) == (
        "",
        "",
        ["paceline lab run a"],
        ["out"],
    )
    assert second.of_lab and not first.of_lab


def test_fragments_are_python() -> None:
    for page, block in all_blocks():
        if block.language == "py":
            assert ast.parse(block.body), page


def test_data_can_be_read(tmp_path: Path) -> None:
    for page, block in all_blocks():
        if block.language == "json":
            assert json.loads(block.body), page
        elif block.language == "toml" and "[[host]]" in block.body:
            (tmp_path / "mine.toml").write_text(block.body)
            assert lab.read(tmp_path / "mine.toml").hosts, page
        elif block.language == "toml":
            assert tomllib.loads(block.body), page
        elif block.language == "bash":
            answer = subprocess.run(
                ["bash", "-n"], input=block.body, text=True, check=False, capture_output=True
            )
            assert answer.returncode == 0, f"{page}: {answer.stderr}"


class Reader:
    """Somebody who goes through a page in a folder of their own, saves what it says, and types what
    it shows.

    The files that pages save to which this one leads are there already.
    """

    def __init__(self, started: Jobs, page: Path) -> None:
        self.jobs, self.folder, self.page = started, started.folder, page
        for path in (ROOT / "examples").rglob("*.py"):
            (self.folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path.relative_to(ROOT)).write_text(
                path.read_text().replace("rand(4096, 2)", f"rand({enough(page)}, 2)")
            )
        (self.folder / "train.py").write_text((self.folder / pages.TRAINING).read_text())
        for other in pages.led_to(page):
            for block in pages.blocks(other):
                if block.language == "python" and block.name:
                    self.save(block)

    def save(self, block: Block) -> Path:
        """A block of Python as the file that the page calls it, or as the script that its
        commands start.
        """
        path = self.folder / (
            block.name or ("train.py" if "pl.start(" in block.body else "block.py")
        )
        body = block.body.replace("(64, 17)", "(32, 17)").replace("rand(2048, 2)", "rand(1024, 2)")
        path.write_text(body)
        return path

    def run(self, block: Block) -> None:
        if block.language == "python":
            answer = nursery.run_script(self.save(block), self.folder)
            assert answer.returncode == 0, f"{block.body}\n{answer.stderr}"
            return
        for line in block.commands:
            if line in ELSEWHERE and runs_first(line) != self.page:
                continue
            code, out, err = self.type(fewer(line))
            assert (code != 0) == (block.marked[0] == "fails"), f"{line}\n{out}\n{err}"
            if "--draw" in line and block.output:
                assert stripped(out.splitlines()) == stripped(block.output)

    def type(self, line: str) -> tuple[int, str, str]:
        """Run one line, as a shell would; paceline and Python are forked with torch in them."""
        words = shlex.split(line)
        if words[0] == "paceline":
            job = self.jobs.start([sys.executable, *PRELOADED, *words[1:]])
        elif words[0] == "python" and words[1].endswith(".py"):
            job = self.jobs.start([sys.executable, *words[1:]])
        else:
            job = self.jobs.start(["bash", "-c", line])
        return job.end()


def enough(page: Path) -> int:
    """How many samples examples train on, in 3 epochs of batches of 64: few, but with the steps
    of which the page's commands speak.
    """
    lines = " ".join(
        line
        for block in pages.blocks(page)
        if block.marked[0] != "not run"
        for line in block.commands
    )
    spoken = [8, *map(int, re.findall(r"(?:step|every)=(\d+)", lines))]
    return next(
        samples for samples in (256, 512, 1024, 2048, 4096) if 3 * samples // 64 > max(spoken)
    )


def fewer(line: str) -> str:
    """The command with two workers in place of four, unless it lays them out along several axes."""
    return (
        line if re.search(r"--mesh '[^']*=", line) else line.replace("--workers 4", "--workers 2")
    )


def runs_first(line: str) -> Path:
    """The first page that has this command."""
    return next(
        page
        for page in PAGES
        for block in pages.blocks(page)
        if block.marked[0] != "not run" and line in block.commands
    )


def stripped(lines: list[str]) -> list[str]:
    """Lines without what isn't seen at their ends, and without the empty ones around them."""
    return "\n".join(line.rstrip() for line in lines).strip("\n").splitlines()


def chosen(page: Path, *, of_lab: bool) -> list[Block]:
    """The blocks of a page that are run, on hosts of a lab or here."""
    runnable = (
        block
        for block in pages.blocks(page)
        if block.language in ("python", "console") and block.marked[0] != "not run"
    )
    return [
        block for block in runnable if (block.of_lab or block.marked[0] == "on two hosts") == of_lab
    ]


def with_blocks(*, of_lab: bool) -> list[Any]:
    return [
        pytest.param(page, id=pages.name(page)) for page in PAGES if chosen(page, of_lab=of_lab)
    ]


@pytest.mark.jobs
@pytest.mark.parametrize("page", with_blocks(of_lab=False))
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    with jobs(tmp_path) as started:
        reader = Reader(started, page)
        for block in chosen(page, of_lab=False):
            reader.run(block)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.skipif(bool(find_missing()), reason=find_missing())
@pytest.mark.parametrize("page", with_blocks(of_lab=True))
def test_blocks_run_in_a_lab(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with jobs(tmp_path) as started:
        reader = Reader(started, page)
        for block in pages.blocks(page):
            if block.marked[0] == "on two hosts":
                monkeypatch.setattr(
                    "paceline.lab.hosts.subprocess",
                    SimpleNamespace(**{**vars(subprocess), "Popen": nursery.on_host}),
                )
                on_two_hosts(reader, block)
            elif block in chosen(page, of_lab=True):
                reader.run(block)
            elif block.language == "python" and block.name:
                reader.save(block)


def on_two_hosts(reader: Reader, block: Block) -> None:
    """Type each line on both hosts of a lab, with the address at which the first can be reached."""
    with lab.cluster(hosts=2, workers=2) as cluster:
        secret = reader.folder / "paceline.secret"
        secret.write_text("00" * 32)
        secret.chmod(0o600)
        for line in block.commands:
            words = shlex.split(fewer(line).replace(MEETING, cluster.hosts[0].address))
            command = [sys.executable, "-P", "-m", *words]
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            both = [
                cluster.spawn(host, command, cwd=reader.folder, process_group=0, **output)
                for host in range(2)
            ]
            # what they write is less than a pipe holds
            codes = [process.wait(PATIENCE) for process in both]
            said = [
                stream.read()
                for process in both
                for stream in (process.stdout, process.stderr)
                if stream
            ]
            assert codes == [0, 0], (line, said)


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in pages.links(pages.text(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{pages.name(page)} leads to {link}"
        assert not anchor or anchor in pages.anchors(target.read_text()), (
            f"{pages.name(page)} leads to {link}: there is no such heading"
        )


def test_what_an_anchor_is() -> None:
    text = (
        "# Who hangs?\n\n## `paceline run`\n```console\n# no heading\n```\n### "
        "2 hosts x 2, 1 Gbit/s\n"
    )
    assert pages.anchors(text) == {"who-hangs", "paceline-run", "2-hosts-x-2-1-gbits"}


def navigated() -> list[str]:
    """The pages that the navigation of the site has."""
    return re.findall(
        r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2], re.MULTILINE
    )


def test_every_page_is_in_the_navigation() -> None:
    made = {*OUTSIDE.values(), *names.pages(), commands.NAME}
    there = {path.relative_to(pages.DOCS).as_posix() for path in pages.DOCS.rglob("*.md")} | made
    assert sorted(navigated()) == sorted(there), (
        "a page of docs/ goes to `nav` in mkdocs.yml, where the site's sections are"
    )
    assert examples.pages(ROOT / "examples")
