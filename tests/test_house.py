"""Tests lie where their modules lie, share helpers in tests/harness, and never import each other.

Both lists may only shrink: a module gets a test file of its name, a test of several modules moves to the one that it is about.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.harness.sources import TOGETHER, parsed

pytestmark = TOGETHER
TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "paceline"
ELSEWHERE = {
    "benchmarks",
    "examples",
    "loops",
    "website",
}  # folders of tests of what is not in the package, and of loops as people write them
UNTESTED = {  # modules without a test file of their name so far: tests of their folder reach them through others
    "__main__",
    "apps/load",
    "callsite",
    "cluster/control/events",
    "cluster/hosts/peers",
    "cluster/launcher/supervisor",
    "cluster/launcher/worker",
    "codec/auto",
    "codec/powersgd",
    "comm/native/transport",
    "comm/sample_queue",
    "comm/shm/registered",
    "data/dynamic",
    "data/indexed",
    "data/reader",
    "data/spec",
    "data/stream_access",
    "errors",
    "lab/enter",
    "server/endpoints",
    "server/scheduler_rpc",
    "session/elastic/adapter",
    "session/groups",
    "session/loop/collectives",
    "session/loop/step_clock",
    "session/elastic/transaction",
    "session/prepare/abilities",
    "session/prepare/binding",
    "session/prepare/lazy",
    "session/prepare/metrics",
    "session/prepare/registry",
    "session/prepare/remote",
    "session/record/collector",
    "session/record/writer",
    "session/replicas/contents",
    "session/start",
    "sync/base",
    "sync/context",
    "sync/localsgd/options",
    "sync/localsgd/rounds",
    "sync/parameterserver/connections",
    "sync/parameterserver/link",
    "sync/parameterserver/options",
    "sync/parameterserver/transfer",
    "sync/parameterserver/units",
    "sync/tables/client",
    "sync/transaction",
}
OF_MORE = {  # test file without a module of its name: what it is about instead
    "observe/page/test_browser": "pages as a browser shows them",
    "test_pages": "blocks of code, links and the navigation of all pages",
    "cluster/launcher/test_restarts_hosts": "jobs of several hosts that start again",
    "cluster/test_hush": "what torch says of strangers at its store",
    "fault/test_hostile": "checkpoints that somebody has made up",
    "session/loop/test_calls": "how many of our functions are called in a step",
    "lab/test_effects": "what faults do, seen from outside",
    "lab/test_pipelines": "pipelines whose stages are on hosts that are apart",
    "lab/test_slow_hosts": "a run that names a slow host",
    "lab/test_uneven_links": "a run that is told of a slow link, and spares it",
    "lab/test_surviving": "runs that survive on hosts of their own",
    "lab/test_probe": "a cluster of the lab, measured",
    "lab/test_scaling": "a script with several numbers of workers on hosts of the lab",
    "lab/test_pairs": "messages between hosts, and the bytes that links count",
    "lab/test_training": "training on hosts that are apart",
    "lab/test_every_strategy": "every strategy on hosts",
    "session/checkpoint/test_saving_processes": "checkpoints of processes that are killed",
    "session/test_axes_processes": "a mesh of real processes",
    "session/test_sharded": "runs whose models are shared out",
    "session/test_coming_processes": "parameters that arrive during forward, on processes",
    "session/replicas/test_compare_processes": "comparison of replicas on processes that die",
    "session/test_equivalence": "the loss curve belongs to the script, on threads",
    "session/test_gpu": "the same script on a GPU",
    "session/test_joining": "hosts that come to a run",
    "session/test_own_loops": "loops without a prepared loader",
    "session/test_processes": "whole runs on processes",
    "session/trackers/test_survival_processes": "jobs whose first worker, which reports them, is killed",
    "session/test_servers_surviving": "losses of servers",
    "session/test_tables_processes": "table servers as programs",
    "session/test_adagrad_cut": "an optimizer that has state from its start, and cut models",
    "session/test_tables_cut": "sparse tables beside cut layers",
    "session/test_tables_surviving": "losses of table servers",
    "sync/test_accumulated": "gradients added up under no_sync, through every strategy",
    "sync/test_dtypes": "every dtype through every strategy",
    "parallel/test_pipeline_equality": "how near pipelines come to one process",
    "parallel/test_pipeline_checkpoints": "layers on several workers in checkpoints, out of any layout into any",
    "parallel/test_pipeline_processes": "pipelines of real processes",
    "parallel/test_pipeline_training": "training as scripts do it, through stages",
    "server/test_hostile_messages": "senseless messages to a server",
    "sync/test_every_strategy": "every strategy on processes",
    "test_architecture": "the map of the tree and the glossary",
    "test_choices": "options with a few choices",
    "test_doors": "strangers at all ports of a job",
    "test_endings": "nothing is left, however a job ends",
    "test_floors": "imports go down",
    "test_help": "docstrings of what is public begin with an example",
    "test_house": "this file",
    "test_misuse": "one clear error for each wrong use",
    "test_packaging": "the package that is built",
    "test_preloaded": "workers that tests fork",
    "test_processes": "the loss curve belongs to the script, on processes",
    "test_readme": "what the pages say is so",
    "test_size": "short files and functions",
    "test_surface": "public names",
    "test_tiers": "which tests run several workers",
    "test_types": "what a checker of types sees",
    "test_walls": "circles, folders, classes",
}


def modules() -> set[str]:
    return {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}


def targets() -> dict[str, str]:
    """Each test file outside of `ELSEWHERE`, and the module that it would be of."""
    paths = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    return {
        path.with_suffix("").as_posix(): path.with_name(path.stem.removeprefix("test_")).as_posix()
        for path in paths
        if path.parts[0] not in ELSEWHERE
    }


# What an import of a test has on its first line: sources without it needn't be parsed, which takes seconds.
SUSPECT = re.compile(r"^\s*(from|import)\s+tests\b.*(\(|\b(test_|conftest\b))", re.MULTILINE)


def imported(source: str) -> Iterator[str]:
    """The modules that it imports, and the names from modules, which may be modules too."""
    for node in parsed(source).nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_tests(source: str) -> list[str]:
    """What this source imports of a test or of a conftest."""
    found = (name.split(".") for name in imported(source))
    return [".".join(name) for name in found if name[0] == "tests" and any(part.startswith("test_") or part == "conftest" for part in name)]


def test_no_test_imports_a_test() -> None:
    sources = {path: text for path in sorted(TESTS.rglob("*.py")) if SUSPECT.search(text := path.read_text())}
    assert {path.relative_to(TESTS).as_posix(): found for path, text in sources.items() if (found := of_tests(text))} == {}


def test_every_module_has_a_test_file_of_its_name() -> None:
    """It lies at the same place: paceline/a/b.py has tests/a/test_b.py."""
    assert modules() - set(targets().values()) - UNTESTED == set()


def test_every_test_file_is_of_a_module_or_says_what_it_is_about() -> None:
    here = modules()
    assert [test for test, module in targets().items() if module not in here and test not in OF_MORE] == []


def test_exceptions_are_still_needed() -> None:
    here, tests = modules(), targets()
    assert [module for module in UNTESTED if module not in here or module in tests.values()] == [], "take these off UNTESTED"
    assert [test for test in OF_MORE if test not in tests or tests[test] in here] == [], "take these off OF_MORE"


def test_the_test_sees_imports_of_tests() -> None:
    assert of_tests("def f():\n    from tests.codec.test_coding import data\n") == ["tests.codec.test_coding.data"]
    assert of_tests("from tests.codec import test_coding") and of_tests("import tests.conftest")
    split = "from tests.codec import (\n    test_coding,\n)"
    lines = ("    from tests.codec.test_coding import data", "from tests.codec import test_coding", "import tests.conftest", split)
    assert all(map(SUSPECT.search, lines)) and not SUSPECT.search("from tests.harness.runs import workers")
    assert of_tests(split) == ["tests.codec.test_coding"]
    assert not of_tests("from tests.harness.codings import data\nimport tests.harness.runs")
