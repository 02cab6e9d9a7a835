"""The public names, the commands and their options: a change here is a change for users, and
goes to the CHANGELOG.
"""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import typer.main

import paceline
from paceline.cli import app

NAMES = [
    "AllReduce",
    "CheckpointError",
    "DeadlineExceeded",
    "Gossip",
    "LocalSGD",
    "Mismatch",
    "PacelineError",
    "ParameterServer",
    "ReplicasDiffer",
    "ResourceError",
    "Run",
    "Sequence",
    "SparseEmbedding",
    "UsageError",
    "WorkerFailed",
    "WorkerLost",
    "__version__",
    "adaptive",
    "after",
    "auto",
    "average",
    "bfloat16",
    "column",
    "compose",
    "elementwise",
    "error_feedback",
    "exact",
    "gathered",
    "half",
    "histogram",
    "image",
    "int4",
    "int8",
    "launch",
    "layers",
    "load",
    "meta",
    "named",
    "nesterov",
    "own_batches",
    "padded",
    "pipeline",
    "plan",
    "powersgd",
    "probe",
    "randomk",
    "row",
    "scattered",
    "sequence",
    "shard",
    "sign",
    "smaller",
    "start",
    "state_dict",
    "summed",
    "tensor",
    "tokens",
    "topk",
    "vocab",
    "where",
]
ARGUMENTS = (  # of start
    "sync name folder seed device deadline late_after trace on_nan total_steps compare differing "
    "replicate mesh straggler cluster report_to"
)
# of Run.prepare
PREPARING = "self objects loss weigh cost shares batchnorm train pad shard cut init"
RUN = (  # of a Run
    "barrier clip close device epochs event events first folder forward gather generator group "
    "host is_first keep local_rank log mean mesh"
    " no_sync prepare print rank results resume save seed size step steps stop sum weight whole"
)
COMMANDS = {
    "run": "script args --workers --hosts --join --host-rank --secret-file --threads --interface "
    "--sync --mesh --cut --shares --name"
    " --placement --min-workers --restarts --patience --resume --save-on-term --grace-seconds "
    "--servers --straggler --cluster --plan "
    "--report-to --backend --horovod --watch --progress --quiet",
    "plan": "subject args --workers --cluster --allow --sync --mesh --cut --memory --what-if "
    "--out --profile --trace --budget --json",
    "lab run": "cluster script args --fault --sync --mesh --cut --shares --name --placement "
    "--min-workers --restarts --patience --cluster --watch",
    "lab probe": "cluster --dtypes --out",
    "lab check": "",
    "lab shell": "host command --lab",
    "lab clean": "",
    "demo": "--workers --steps --alone --folder --text --mesh",
    "generate": "folder --prompt --workers --mesh --tokens --temperature --greedy --seed --best --threads",  # noqa: E501
    "bench collectives": "--workers --threads --sizes --via --seconds --draw",
    "bench pipeline": "--draw --forward --backward --transfer",
    "bench scaling": (
        "script args --workers --kind --batch-option --lab --rounds --steps --seconds --threads "
        "--sync --folder --read"
    ),
    "bench training": "--workers --threads --model --batch --steps --sync",
    "probe": (
        "--workers --hosts --join --host-rank --secret-file --threads --interface --placement "
        "--dtypes --out"
    ),
    "report": "folders --html",
    "watch": "folder --listen --secret-file",
    "export": "folder out --part --best --force",
    "layout": "script args --workers --sync --mesh --cut",
}


def test_public_names() -> None:
    assert paceline.__all__ == NAMES
    assert all(getattr(paceline, name) is not None for name in NAMES)
    assert set(NAMES) <= set(dir(paceline))


def test_arguments_of_start() -> None:
    assert " ".join(inspect.signature(paceline.start).parameters) == ARGUMENTS


def test_arguments_of_prepare() -> None:
    assert " ".join(inspect.signature(paceline.Run.prepare).parameters) == PREPARING


def test_names_of_a_run() -> None:
    assert " ".join(name for name in dir(paceline.Run) if not name.startswith("_")) == RUN


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'begin'; it has AllReduce"):
        paceline.begin  # noqa: B018
    with pytest.raises(ImportError):
        exec("from paceline import begin")


def commands(group: object, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            found |= commands(command, f"{prefix}{name} ")
        else:
            written = (parameter.opts[0] for parameter in command.params)
            found[f"{prefix}{name}"] = " ".join(written)
    return found


def test_commands_and_options() -> None:
    assert commands(typer.main.get_command(app)) == COMMANDS


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.jobs
def test_importing_paceline_imports_no_torch() -> None:
    assert (
        python(
            "import sys, paceline; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
        ).returncode
        == 0
    )


@pytest.mark.jobs
def test_starting_imports_no_compiler() -> None:
    """torch's compiler takes half a second to import."""
    code = "import sys, paceline; paceline.start; sys.exit('torch._dynamo' in sys.modules)"
    assert python(code).returncode == 0


@pytest.mark.jobs
def test_help_needs_few_modules() -> None:
    """It is quick by what it doesn't import; how long it takes is the machine's."""
    code = (
        "import sys; sys.argv[1:] = ['--help']; from paceline.cli import app; "
        "app(standalone_mode=False);"
    )
    answer = python(code + "sys.exit('torch' in sys.modules or 'rich.console' in sys.modules)")
    assert answer.returncode == 0, answer.stderr
    answer = python(code + "print(len(sys.modules), file=sys.stderr)")
    assert int(answer.stderr) < 450, answer.stderr


@pytest.mark.jobs
def test_garbage_is_looked_for_in_what_comes_after_the_imports() -> None:
    begin = "import gc, sys, torch, paceline; "
    frozen = "paceline.start; sys.exit(not gc.isenabled() or gc.get_freeze_count() < 10**5)"
    assert python(begin + frozen).returncode == 0
    left_alone = (
        "gc.disable(); paceline.start; sys.exit(gc.isenabled() or gc.get_freeze_count() > 0)"
    )
    assert python(begin + left_alone).returncode == 0
