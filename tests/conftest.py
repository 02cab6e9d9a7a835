"""What holds for all tests."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import itertools
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.harness import compiling, scratch, sources
from tests.harness.tiers import LAB, thin, tier, uses

if TYPE_CHECKING:
    from tests.harness.jobs import Jobs
    from tests.harness.survivors import Outcome

# before torch is imported: tests that run side by side leave each other the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
# looking for GPUs doesn't begin to use them, after which nothing can be forked
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
ROOT = str(Path(__file__).parents[1])

# a machine may be slow for a moment
hypothesis.settings.register_profile("paceline", deadline=None)
hypothesis.settings.load_profile("paceline")


GROUPS = ("lab", "machine")  # tests of a group run one after another

_ended, _libc = itertools.count(1), ctypes.CDLL(None)
if hasattr(_libc, "mallopt"):
    _libc.mallopt(-8, 2)  # M_ARENA_MAX: trainings on threads leave no heap for each thread behind


@pytest.hookimpl(optionalhook=True)  # processes of xdist know no such hook
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for each core, as tests wait half of the time; none where only files are
    asked for, as starting takes seconds.
    """
    if given := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(given)
    if all(".py" in path for path in config.args):
        return 0
    return 2 * len(os.sched_getaffinity(0))


def pytest_configure(config: pytest.Config) -> None:
    """Have temporary files in memory where many tests run: those of a single file are kept on the
    disk, to be looked at.

    Tests see GPUs with `-m gpu` alone: all others are of processors, and fork where autograd would
    have threads for GPUs.
    """
    if not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr", "")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if (
        config.getoption("numprocesses", None)
        and config.getoption("basetemp") is None
        and (end := scratch.in_memory()) is not None
    ):
        config.add_cleanup(end)


@pytest.hookimpl(tryfirst=True)  # before -m is looked at, and before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with their tiers, put the groups first, and mix what waits (programs) with what
    computes.
    """
    thin(items)
    found = [tier(item) for item in items]
    seen, sizes = Counter[str](), Counter(found)
    places: dict[str, float] = {}
    for item, name in zip(items, found, strict=True):
        seen[name] += 1
        places[item.nodeid] = seen[name] / sizes[name]
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
            places[item.nodeid] = GROUPS.index(group) - len(GROUPS)
        item.add_marker(name)
    items.sort(key=lambda item: places[item.nodeid])


def _group(item: pytest.Item) -> str:
    """Name the group of tests that run one after another; empty for a test of none."""
    names, fixtures = uses(item)
    return "lab" if fixtures & LAB else next((group for group in GROUPS if group in names), "")


def pytest_collectstart() -> None:
    """Have torch before any test module asks for it, with its compiler, which optimizers load.

    Each process of a DataLoader would load `numpy.random` by itself, were it not there when it is
    forked. Nobody looks for garbage until all tests are collected.
    """
    gc.disable()
    for name in ("torch", "torch._dynamo", "tests.harness.generator_lock", "numpy.random"):
        importlib.import_module(name)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Load all test modules, in each process of xdist from another one on: what one has compiled
    the others read.
    """
    which = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not which or any(".py" in path for path in session.config.args):
        return
    pytest_collectstart()
    paths = sorted(Path(ROOT, "tests").rglob("test_*.py"))
    first = int(which) * len(paths) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for path in (*paths[first:], *paths[:first]):
        # whoever collects it tells what is wrong with it
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there before the first test is there for good: nobody looks for garbage in it,
    here or in the processes that are forked.
    """
    if session.config.getoption("loadgroup", False):
        loose = [
            item.nodeid
            for item in session.items
            if (group := _group(item)) and not item.nodeid.endswith(f"@{group}")
        ]
        assert not loose, (
            "pytest-xdist makes no groups with this pytest, and these run one after another: "
            f"{loose[:3]}"
        )
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have torch's compiler loaded before a test begins in which it compiles."""
    if compiling.compiles(item):
        compiling.load()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop the trees of sources after the last test that reads them: each garbage collection of
    later tests would go through them.
    """
    if sources.reads(item) and (nextitem is None or not sources.reads(nextitem)):
        sources.parsed.cache_clear()


def pytest_runtest_logfinish() -> None:
    """Give memory that nobody uses back to the system now and then: what is forked copies the
    tables of all that a process has.

    What is there then is there for long (modules, caches): nobody looks for garbage in it from then
    on, which would take 0.3 s each time.
    """
    if next(_ended) % 50 == 0:
        gc.collect()
        gc.freeze()
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Ctrl-C is heard here and by what is started here, even if the tests run in the background
    of a shell, which has it ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _importable() -> None:
    """Programs under test may import the tests, wherever they lie."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [ROOT, *(path for path in given if path not in ("", ROOT))]
    )


@pytest.fixture
def disk_path(tmp_path: Path) -> Iterator[Path]:
    """A folder as `tmp_path` is one, on the disk."""
    with tempfile.TemporaryDirectory(
        prefix="pl-", dir=os.environ.get(scratch.DISK, tmp_path)
    ) as folder:
        yield Path(folder)


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Jobs in a folder of their own; their launchers and workers are forked, or are programs
    where the test is marked `real_processes`.
    """
    from tests.harness.jobs import PLAIN, PRELOADED, jobs

    with jobs(
        tmp_path, PLAIN if request.node.get_closest_marker("real_processes") else PRELOADED
    ) as found:
        yield found


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """What comes of a training by one worker that nobody disturbs; each is made once for all
    processes of the tests.
    """
    from tests.harness.jobs import jobs
    from tests.harness.shared_results import once, shared_folder
    from tests.harness.survivors import play

    folder = shared_folder(tmp_path_factory.getbasetemp())

    def make(**parts: Any) -> Outcome:
        def run() -> Outcome:
            with jobs(tmp_path_factory.mktemp("alone")) as found:
                return play(found, "alone", workers=1, nap=0, **parts)

        which = hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:16]
        outcome: Outcome = once(folder / f"alone-{which}.pickle", run)
        return outcome

    return make
