"""`paceline run --plan`: takes workers, strategy and shares of a run from a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.cluster.launcher.request import LaunchRequest
from paceline.errors import UsageError
from paceline.planner.plan_file import read_plan


def follow_plan(request: LaunchRequest, path: Path, workers: int | None) -> LaunchRequest:
    """Complete a request by a plan.

    Args:
        request: What the command line says.
        path: The plan.
        workers: Workers of this host, if the command line says it.

    Raises:
        UsageError: The plan can't be read, or the command line contradicts it.
    """
    plan = read_plan(path)
    if plan.hosts != request.hosts:
        raise UsageError(
            f"{path} is for {plan.hosts} host{'s' if plan.hosts > 1 else ''}: "
            f"say --hosts {plan.hosts} on each"
        )
    if request.host_rank is None and len(set(plan.workers)) > 1:
        raise UsageError(
            f"{path} has different numbers of workers on its hosts: say --host-rank on each"
        )
    if request.host_rank is not None and request.host_rank >= plan.hosts:
        raise UsageError(f"--host-rank {request.host_rank}: {path} has {plan.hosts} hosts")
    planned = plan.workers[request.host_rank or 0]
    for name, given, value in (
        ("workers", workers, planned),
        ("sync", request.sync, plan.sync or None),
        ("mesh", request.mesh, plan.mesh or None),
        ("cut", request.cut, plan.cut or None),
        ("shares", request.shares, plan.shares or None),
    ):
        if given is not None and given != value:
            raise UsageError(
                f"--{name} {given} contradicts {path}, which plans {value or 'none'}: "
                "leave one of them out"
            )
    return replace(
        request,
        workers=planned,
        sync=plan.sync or None,
        mesh=plan.mesh or None,
        cut=plan.cut or None,
        shares=plan.shares or None,
        plan=path,
    )
