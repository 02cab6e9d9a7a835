"""The file of a measured cluster, `cluster.json`: a `Topology` as JSON, with a version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from paceline.cluster.topology import Device, DeviceSpeed, HostLink, HostRanks, Interface, Topology
from paceline.errors import UsageError

FORMAT_NAME: Final = "paceline cluster"
VERSION: Final = 1
MAX_NUMBER: Final = 1e30  # numbers have to be smaller
T = TypeVar("T")


def format_topology(topology: Topology) -> str:
    """Format a topology as JSON, which `parse_topology` reads."""
    return (
        json.dumps(
            {"form": FORMAT_NAME, "version": VERSION, **asdict(topology)}, indent=1, allow_nan=False
        )
        + "\n"
    )


def parse_topology(text: str, source: str = "the text") -> Topology:
    """Parse JSON of `format_topology`. Raises `UsageError` for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{source} isn't JSON ({error}): measure the cluster with `paceline probe`, which "
            "writes such a file"
        ) from error
    if not isinstance(content, dict) or content.get("form") != FORMAT_NAME:
        raise UsageError(f"{source} isn't a measured cluster: `paceline probe` writes one")
    if content.get("version") != VERSION:
        raise UsageError(
            f"{source} has version {content.get('version')!r}, and this paceline reads version "
            f"{VERSION}: measure again with `paceline probe`"
        )
    try:
        hosts = tuple(_parse_host(each) for each in content["hosts"])
        topology = Topology(
            hosts, tuple(_make_dataclass(HostLink, each) for each in content["links"])
        )
        # A user may edit the file: all that the rest of the package relies on is checked.
        if sorted(rank for host in hosts for rank in host.ranks) != [
            *range(topology.size)
        ] or not all(host.ranks for host in hosts):
            raise ValueError("its ranks are not 0, 1, ... without a gap")
        if any(len(host.devices) not in (0, len(host.ranks)) for host in hosts):
            raise ValueError("a host has more or fewer devices than workers")
        return topology
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{source} is incomplete or damaged ({type(error).__name__}: {error}): "
            "measure again with `paceline probe`"
        ) from error


def write_topology(path: Path, topology: Topology) -> None:
    """Write the file. Raises `UsageError` if it can't be written."""
    try:
        path.write_text(format_topology(topology), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} can't be written ({error.strerror}): name another file with --out"
        ) from error


def read_topology(path: Path) -> Topology:
    """Read the file. Raises `UsageError` if it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} can't be read ({error}): measure the cluster "
            f"with `paceline probe --out {path}`"
        ) from error
    return parse_topology(text, str(path))


def check_target(path: Path) -> None:
    """Raise `UsageError` if a measurement shouldn't be written to this file.

    Called before anything is measured.
    """
    if not path.parent.is_dir():
        raise UsageError(
            f"--out {path}: there is no folder {path.parent}; make it, or name another file"
        )
    if path.is_dir():
        raise UsageError(
            f"--out {path} is a folder: name a file in it, such as {path / 'cluster.json'}"
        )
    if path.exists():
        try:
            read_topology(path)
        except UsageError as error:
            raise UsageError(
                f"--out {path} would replace a file that isn't a measured cluster of this version: "
                "name another"
            ) from error


def _parse_host(entry: Mapping[str, Any]) -> HostRanks:
    """Make a host from its JSON object."""
    devices = tuple(
        _make_dataclass(
            Device,
            each | {"speeds": tuple(_make_dataclass(DeviceSpeed, one) for one in each["speeds"])},
        )
        for each in entry["devices"]
    )
    interfaces = tuple(_make_dataclass(Interface, each) for each in entry["interfaces"])
    # JSON has lists in place of tuples.
    return _make_dataclass(
        HostRanks,
        {**entry, "ranks": tuple(entry["ranks"]), "devices": devices, "interfaces": interfaces},
    )


def _make_dataclass(kind: type[T], entry: Mapping[str, Any]) -> T:
    """Make a dataclass from a JSON object that has exactly its fields."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if set(entry) != names:
        raise KeyError(*sorted(set(entry) ^ names))
    for name, wanted in get_type_hints(kind).items():
        if not _fits_annotation(entry[name], wanted):
            raise TypeError(f"{name} can't be {repr(entry[name])[:40]}")
    return kind(**entry)


def _fits_annotation(value: Any, wanted: Any) -> bool:
    """Whether a value fits the annotation of a field. Numbers are 0 or more, and not huge."""
    if get_origin(wanted) is tuple:
        return all(_fits_annotation(each, get_args(wanted)[0]) for each in value)
    if get_args(wanted):
        return any(_fits_annotation(value, part) for part in get_args(wanted))
    # `type`, as a bool is an int. A JSON int fits a float field.
    if type(value) in (int, float):
        return (
            wanted in (int, float)
            and isinstance(value, int if wanted is int else (int, float))
            and 0 <= value < MAX_NUMBER
        )
    return type(value) is wanted
