"""A module imports from floors below its own and from its own folder only, inside functions too."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.harness.sources import TOGETHER, parsed

pytestmark = TOGETHER
PACKAGE = Path(__file__).parent.parent / "paceline"
FLOORS = [  # a part is a module or a folder; a folder inside another may lie on a floor of its own
    {"at_exit", "callsite", "errors", "trace", "formatting", "timings"},
    {"native"},
    {"status", "removed"},
    {"state", "cluster"},
    {"comm"},
    {"codec"},
    {"sync"},
    {"parallel", "data", "checkpoint.files"},
    {"notation"},
    {"planner"},
    {"workers"},
    {"servers"},
    {"record.logged"},
    {"loop"},
    {"replicas"},
    {"prepare"},
    {"unequal.stragglers"},
    {"record"},
    {"unequal"},
    {"checkpoint"},
    {"elastic"},
    {"session"},
    {"notebook"},
    {"lab", "observe", "backend", "options"},
    {"planner.planning"},
    {"bridges"},
    {"apps", "bench", "commands"},
    {"cli"},
    {"__main__"},
]
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}
PROGRAMS = {"apps", "bench", "cli"}  # written as a user would: they may `import paceline` itself


def part(name: str) -> str:
    """The part that a module without `paceline.` belongs to: the one inside of another where
    there is one.
    """
    first, _, rest = name.partition(".")
    inner = f"{first}.{rest.partition('.')[0]}"
    return inner if inner in FLOOR else first


def imports(source: str) -> list[str]:
    nodes = parsed(source).nodes
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    relative = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    assert not relative, "relative imports hide the floor they go to"
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return named + [f"{node.module}.{alias.name}" for node in froms for alias in node.names]


def faults(path: Path, source: str) -> list[str]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):  # the roof: its names are lazy
        return []
    here, found = part(".".join(parts)), []
    for name in imports(source):
        if name.split(".")[0] != "paceline":
            continue
        there = part(name.partition(".")[2] or "paceline")
        if there not in FLOOR:
            if here not in PROGRAMS:
                found.append(f"{path.name} imports {name}, which is on no floor")
        elif there != here and FLOOR[there] >= FLOOR[here]:
            found.append(f"{path.name} (floor {FLOOR[here]}) imports {name} (floor {FLOOR[there]})")
    return found


def test_every_import_goes_down() -> None:
    assert [
        fault for path in sorted(PACKAGE.rglob("*.py")) for fault in faults(path, path.read_text())
    ] == []


def test_every_module_has_a_floor() -> None:
    parts = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")
    }
    assert parts - {"__init__"} <= set(FLOOR)
    # the bridge's modules have the names by which scripts import Horovod's
    paths = {*PACKAGE.rglob("*")} - {PACKAGE / "bridges" / "horovod" / "common"}
    assert not {"utils", "common", "core", "misc"} & {path.name for path in paths}


def test_the_test_sees_wrong_imports() -> None:
    inside = "def f():\n    from paceline.session.start import start\n"
    assert faults(PACKAGE / "comm" / "x.py", inside)
    # neighbours are strangers
    assert faults(PACKAGE / "data" / "x.py", "import paceline.parallel.cut")
    assert faults(PACKAGE / "prepare" / "x.py", "import paceline.record.log")
    assert not faults(PACKAGE / "prepare" / "x.py", "import paceline.record.logged.metric")
    assert faults(PACKAGE / "comm" / "x.py", "from paceline import start")
    assert not faults(
        PACKAGE / "comm" / "x.py",
        "from paceline import errors\nfrom paceline.comm.group_protocol import Group",
    )
