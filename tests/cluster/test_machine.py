"""How many files a job may have open."""

from __future__ import annotations

import sys

import pytest

BODY = "import resource\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))"


def limited(limit: str, *words: str) -> list[str]:
    return ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", sys.executable, "-m", "paceline", *words]


@pytest.mark.parametrize(("command", "needed"), [(("run", "-n", "3"), 100), (("lab", "run", "two-hosts"), 80)])
def test_too_few_descriptors_are_said_in_a_line(job, command, needed):
    (job.folder / "script.py").write_text(BODY)
    ended = job.start(limited("-n 24", *command, "script.py")).end()
    assert ended.code in {1, 2} and ended.out == "" and len(ended.err.splitlines()) == 1
    assert f"need {needed} descriptors (open files, sockets), and the limit is 24: say `ulimit -n {needed}` before" in ended.err


def test_a_soft_limit_is_raised_as_far_as_needed(job):
    (job.folder / "script.py").write_text(BODY)
    ended = job.start(limited("-S -n 24", "run", "-n", "3", "script.py")).end()
    assert ended.code == 0 and {line.split()[1] for line in ended.out.splitlines()} == {"100"}, ended.err


def test_a_limit_that_suffices_stays(job):
    (job.folder / "script.py").write_text(BODY)
    ended = job.start(limited("-S -n 500", "run", "script.py")).end()
    assert ended.code == 0 and ended.out.split()[1] == "500", ended.err
