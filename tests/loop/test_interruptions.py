"""What interrupts a worker is measured where it happens: planted garbage, a crowded processor,
pages that are not in memory.
"""

from __future__ import annotations

import gc
import hashlib
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.loop.interruptions import LONGEST_FAULT, InterruptionMeter, Interruptions
from paceline.trace import Trace
from tests.harness.garbage import litter

SCHEDSTAT = Path("/proc/self/schedstat").exists()


def meter(trace: Trace | None = None, proc: Path = Path("/proc")) -> InterruptionMeter:
    """One that has begun."""
    found = InterruptionMeter(trace or Trace(), proc)
    assert found.take_interruptions(1.0) == Interruptions()  # nothing is known of what was before
    return found


def test_garbage_collection_is_measured_and_drawn() -> None:
    trace = Trace()
    found = meter(trace)
    litter()
    began = time.thread_time()
    gc.collect()
    ran = time.thread_time() - began
    taken = found.take_interruptions(100.0)
    assert taken.collection >= 0.5 * ran > 0
    assert found.take_interruptions(100.0).collection < taken.collection  # it is counted once
    assert "generation 2" in {span.name for span in trace.list_spans() if span.kind == "collection"}
    found.close()


def test_the_collections_of_another_thread_are_not_mine() -> None:
    found = meter()
    gc.disable()
    try:
        other = threading.Thread(target=gc.collect)
        other.start()
        other.join()
        assert found.take_interruptions(1.0).collection == 0.0
    finally:
        gc.enable()
        found.close()


def test_nothing_is_more_than_the_time_that_there_was() -> None:
    found = meter()
    litter()
    gc.collect()
    taken = found.take_interruptions(1e-6)
    assert taken.collection == pytest.approx(1e-6) and sum(taken) == pytest.approx(1e-6)
    found.close()


def write_proc(folder: Path, *, delayed: int, steal: int) -> None:
    """Write what the kernel would, for this thread."""
    thread = folder / f"self/task/{threading.get_native_id()}"
    thread.mkdir(parents=True, exist_ok=True)
    for path in (thread / "schedstat", folder / "self/schedstat"):
        path.write_text(f"123 {delayed} 7\n")
    (folder / "stat").write_text(f"cpu  1 2 3 4 5 6 7 {steal} 9 10\ncpu0 0 0\n")


def test_sleep_is_no_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on and the thread doesn't run, but the kernel counts no delay and no fault.

    A real kernel can't be asked: it now and then takes an idle processor's sleep for a delay.
    """
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    usage = SimpleNamespace(ru_majflt=3)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    write_proc(tmp_path, delayed=5_000_000_000, steal=0)
    found = meter(proc=tmp_path)
    now[0] += 0.2
    assert found.take_interruptions(100.0) == Interruptions()
    usage.ru_majflt = 4
    now[0] += 0.2
    assert found.take_interruptions(100.0) == Interruptions(paging=LONGEST_FAULT)
    found.close()


def test_a_delayed_thread_has_lost_its_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    write_proc(tmp_path, delayed=5_000_000_000, steal=0)
    found = meter(proc=tmp_path)
    assert found.unmeasured == ()
    write_proc(tmp_path, delayed=5_300_000_000, steal=0)
    assert (
        found.take_interruptions(1.0).stolen == 0.0
    )  # a thread that has run all the time isn't looked at
    now[0] += 1.0
    assert found.take_interruptions(1.0).stolen == pytest.approx(0.3)
    now[0] += 1.0
    assert found.take_interruptions(1.0).stolen == 0.0
    found.close()


@pytest.mark.skipif(not SCHEDSTAT, reason="this kernel counts no delays")
def test_a_processor_that_a_program_has_is_lost() -> None:
    """One that never rests, beside a thread of less priority."""
    core = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    taken: list[Interruptions] = []

    def burn() -> None:
        os.sched_setaffinity(0, [core])
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        found = meter()
        hashlib.pbkdf2_hmac("sha256", b"all the same", b"work", 100_000)
        taken.append(found.take_interruptions(1000.0))
        found.close()

    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            thread = threading.Thread(target=burn)
            thread.start()
            thread.join()
        finally:
            other.kill()
    assert taken[0].stolen > 0


def test_what_the_host_of_a_virtual_machine_takes_is_shared_by_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    tick = os.sysconf("SC_CLK_TCK")
    write_proc(tmp_path, delayed=0, steal=1000)
    found = meter(proc=tmp_path)
    write_proc(tmp_path, delayed=0, steal=1000 + 2 * tick)
    assert found.take_interruptions(5.0).stolen == 0.0  # looked at a moment ago
    now[0] += 1.1
    assert found.take_interruptions(5.0).stolen == pytest.approx(0.5)
    found.close()


def test_where_the_kernel_tells_nothing_that_is_known(tmp_path: Path) -> None:
    found = meter(proc=tmp_path)
    assert found.unmeasured == ("stolen",) and found.take_interruptions(1.0).stolen == 0.0
    found.close()


def test_pages_that_are_waited_for(disk_path: Path) -> None:
    """A mapped file that isn't in memory any more; of memory that is swapped out the kernel
    counts the same.
    """
    path = disk_path / "pages"
    path.write_bytes(os.urandom(8 << 20))
    found = meter()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            pages.madvise(mmap.MADV_RANDOM)
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
            found.take_interruptions(0.0)
            began = time.perf_counter()
            assert sum(pages[at] for at in range(0, 8 << 20, 1 << 16)) > 0
            seconds = time.perf_counter() - began
    taken, faults = (
        found.take_interruptions(seconds),
        resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before,
    )
    found.close()
    if not faults:
        pytest.skip("this file system keeps files in memory")
    assert 0 < taken.paging <= min(seconds, LONGEST_FAULT * faults)


def test_a_closed_meter_measures_nothing() -> None:
    before = len(gc.callbacks)
    found = meter()
    assert len(gc.callbacks) == before + 1
    found.close()
    found.close()
    assert len(gc.callbacks) == before and found.take_interruptions(1.0) == Interruptions()


def test_it_follows_the_thread_that_trains(tmp_path: Path) -> None:
    found, taken = meter(), []

    def train() -> None:
        found.take_interruptions(1.0)
        litter()
        gc.collect()
        taken.append(found.take_interruptions(100.0))

    other = threading.Thread(target=train)
    other.start()
    other.join()
    assert taken[0].collection > 0
    found.close()
