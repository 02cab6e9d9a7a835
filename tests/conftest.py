"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.harness.jobs import Jobs
    from tests.harness.survivors import Outcome

ROOT = str(Path(__file__).parents[1])

hypothesis.settings.register_profile("paceline", deadline=None)  # a machine may be slow for a moment
hypothesis.settings.load_profile("paceline")


def pytest_collection_finish() -> None:
    """What is there before the first test is there for good: nobody looks for garbage in it, here or in the processes that are forked."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Ctrl-C is heard here and by what is started here, even if the tests run in the background of a shell, which has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _importable() -> None:
    """Scripts under test may import `tests.harness.brisk`, wherever they lie."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *(path for path in given if path not in ("", ROOT))])


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Jobs in a folder of their own; workers are forked where the test is marked so."""
    from tests.harness.jobs import PLAIN, PRELOADED, jobs

    with jobs(tmp_path, PRELOADED if request.node.get_closest_marker("preloaded") else PLAIN) as found:
        yield found


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """What comes of a training by one worker that nobody disturbs; each is made once."""
    from tests.harness.jobs import PRELOADED, jobs
    from tests.harness.survivors import play

    made: dict[str, Outcome] = {}

    def make(**parts: Any) -> Outcome:
        if (key := repr(sorted(parts.items()))) not in made:
            with jobs(tmp_path_factory.mktemp("alone"), PRELOADED) as found:
                made[key] = play(found, "alone", workers=1, nap=0, **parts)
        return made[key]

    return make
