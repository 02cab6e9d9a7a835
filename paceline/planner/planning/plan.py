"""Plans a script, a profile of it, or a finished run: `pl.plan(...)`, and `paceline plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice
from paceline.planner import ledger
from paceline.planner.answer import Plan, Wishes, make_plan
from paceline.planner.planning import finished_run, measured_script, planned_input

Allow = Literal["exact", "lossy"]


def plan(
    subject: str | Path,
    *,
    workers: int | None = None,
    cluster: str | Path | None = None,
    args: Sequence[str] = (),
    allow: Allow = "exact",
    sync: Any = None,
    mesh: str | None = None,
    cut: Any = None,
    memory: str | None = None,
    what_if: Sequence[str] = (),
    folder: str | Path = ".",
    notify: Callable[[str], None] | None = None,
) -> Plan:
    """Say which way of training a script is fastest, and whether more workers help, before a run.

    >>> plan = pl.plan("train.py", cluster="two-boxes.toml")  # measures for some seconds
    >>> print(plan.verdict)
    >>> plan.save("plan.toml")  # for: paceline run --plan plan.toml train.py

    Args:
        subject: The training script (.py), a profile of it (.json), or the folder of a finished
            run. The command `paceline plan` takes transformers by numbers as well.
        workers: Plan for this host with as many workers.
        cluster: The cluster: a file of `paceline probe` (.json), or a description (.toml, or a name
            of `paceline lab`). For a script or a profile, give either this or `workers`.
        args: Arguments of the script.
        allow: "lossy" for strategies that change the loss curve as well. Default: "exact".
        sync: The only strategy to plan, as `pl.start` takes it. Default: all that are priced.
        mesh: The only mesh to plan, such as "data=2, stage=2". Default: all.
        cut: The only cut to plan: `pl.shard`, `pl.pipeline` or `pl.tensor`, or its text. Default:
            all.
        memory: Memory of a worker, such as "8GB". Default: no limit.
        what_if: Changes of the cluster: "link=10gbit", "hosts=4", "workers=2", "sync=S".
        folder: Folder of the ledger of earlier runs. Default: the current one.
        notify: Called with a line for each thing that is measured. Default: none.

    Returns:
        The plan.

    Raises:
        UsageError: The script can't be measured, options contradict each other, a pinned way is
            impossible, or nothing fits into the memory.
    """
    path, source = Path(subject), None if cluster is None else str(cluster)
    if wrong := describe_unknown_choice("allow", allow, Allow):
        raise UsageError(wrong)
    changes, strategy = planned_input.split_changes(what_if, None if sync is None else str(sync))
    wishes = Wishes(
        allow == "lossy",
        strategy,
        planned_input.parse_memory(memory),
        mesh,
        None if cut is None else str(cut),
    )
    notify = _ignore if notify is None else notify
    if path.suffix == ".toml":
        raise UsageError(f"{path} is a transformer by numbers: say paceline plan {path}")
    if path.is_dir():
        if workers is not None or args:
            raise UsageError(
                f"{path} is a run: it has its own workers and arguments; say --what-if workers=N, "
                "without --workers and arguments"
            )
        found, shown = finished_run.plan_run(path, source, changes, wishes)
        notify(shown)
        return found
    chosen = planned_input.choose_cluster(workers, source)
    chosen = planned_input.apply_changes(chosen, changes)
    profile = measured_script.get_profile(path, args, chosen, wishes, notify)
    # The ledger of earlier runs lies beside the plan.
    entries = ledger.read_entries(Path(folder) / ledger.NAME)
    correction = ledger.learn_correction(entries, chosen.source, profile.script)
    return make_plan(profile, chosen, wishes, correction)


def _ignore(line: str) -> None:
    """Ignore a line."""
