"""How many files a job may have open, and what a machine has of memory and clocks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cluster import machine

BODY = "import resource\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))"


def limited(limit: str, *words: str) -> list[str]:
    return [
        "sh",
        "-c",
        f'ulimit {limit}; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "paceline",
        *words,
    ]


@pytest.mark.parametrize(
    ("command", "needed"), [(("run", "-n", "3"), 100), (("lab", "run", "two-hosts"), 80)]
)
def test_too_few_descriptors_are_said_in_a_line(job, command, needed):
    (job.folder / "script.py").write_text(BODY)
    ended = job.start(limited("-n 24", *command, "script.py")).end()
    assert ended.code in {1, 2} and ended.out == "" and len(ended.err.splitlines()) == 1
    assert (
        f"need {needed} descriptors (open files, sockets), and the limit is 24: "
        f"run `ulimit -n {needed}` before" in ended.err
    )


def test_a_soft_limit_is_raised_as_far_as_needed(job):
    (job.folder / "script.py").write_text(BODY)
    ended = job.start(limited("-S -n 24", "run", "-n", "3", "script.py")).end()
    assert ended.code == 0 and {line.split()[1] for line in ended.out.splitlines()} == {"100"}, (
        ended.err
    )


def test_a_limit_that_suffices_stays(job):
    (job.folder / "script.py").write_text(BODY)
    ended = job.start(limited("-S -n 500", "run", "script.py")).end()
    assert ended.code == 0 and ended.out.split()[1] == "500", ended.err


def grouped(folder: Path, lines: str, **files: str) -> dict[str, Path]:
    """A machine of 1,000 KB, 400 of them free, whose control groups have these files."""
    (folder / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 400 kB\n")
    (folder / "cgroup").write_text(lines)
    for path, text in files.items():
        target = folder / "mount" / path.replace("__", "/").replace("_at_", ".")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return {"source": folder / "meminfo", "proc": folder / "cgroup", "mount": folder / "mount"}


def test_memory_without_limits_is_the_machines(tmp_path: Path) -> None:
    where = grouped(tmp_path, "0::/job\n", job__memory_at_max="max", job__memory_at_current="5")
    assert machine.measure_memory(**where) == (1_024_000, 409_600)
    assert machine.measure_memory(tmp_path / "none", tmp_path / "none", tmp_path) == (0, 0)


def test_the_limits_of_all_enclosing_groups_count(tmp_path: Path) -> None:
    outer = {
        "job__memory_at_max": "300000\n",
        "job__memory_at_current": "150000\n",
        "job__memory_at_stat": "anon 7\ninactive_file 50000\n",
    }
    inner = {
        "job__in__memory_at_max": "250000\n",
        "job__in__memory_at_current": "20000\n",
        "job__in__memory_at_stat": "",
    }
    assert machine.measure_memory(**grouped(tmp_path, "0::/job/in\n", **outer, **inner)) == (
        250_000,
        200_000,
    )


def test_limits_of_the_first_version_count_too(tmp_path: Path) -> None:
    files = {
        "memory__job__memory_at_limit_in_bytes": "100000",
        "memory__job__memory_at_usage_in_bytes": "99000",
    }
    files |= {
        "memory__job__memory_at_stat": "total_inactive_file 4000\n",
        "memory__memory_at_limit_in_bytes": str((1 << 63) - 4096),
    }
    assert machine.measure_memory(**grouped(tmp_path, "5:memory:/job\n4:cpu:/job\n", **files)) == (
        100_000,
        5_000,
    )


def test_the_clock_of_the_fastest_core_counts(tmp_path: Path) -> None:
    assert machine.read_clock(tmp_path) == (0.0, 0.0, "")
    for core, (now, governor) in enumerate(((1_200_000, "powersave"), (800_000, "powersave"))):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        for name, value in (
            ("scaling_cur_freq", now),
            ("cpuinfo_max_freq", 3_200_000),
            ("scaling_governor", governor),
        ):
            (folder / name).write_text(f"{value}\n")
    (tmp_path / "cpufreq").mkdir()
    assert machine.read_clock(tmp_path) == (1.2e9, 3.2e9, "powersave")


def test_what_a_machine_is_called(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU: 2 GHz\n")
    assert (
        machine.read_processor_name(tmp_path / "cpuinfo") == "Some CPU: 2 GHz"
        and machine.read_processor_name(tmp_path / "none") == ""
    )
    assert machine.identify_boot() == machine.identify_boot() and len(machine.identify_boot()) == 16
