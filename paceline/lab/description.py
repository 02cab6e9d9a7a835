"""The description of a cluster as frozen data: hosts, their links, and racks.

A description comes from Python, from a TOML file, or from a ready-made file of paceline.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from paceline.cluster.launcher.request import PLACEMENTS, Placement
from paceline.errors import UsageError
from paceline.formatting import format_choices

Rate: TypeAlias = int  # bits per second

MOST_HOSTS: Final = 200
CLUSTERS: Final = Path(__file__).parent / "clusters"
# Bits per second. The upper bound comes from tbf, which counts bytes per second in 32 bits.
_SLOWEST, _FASTEST = 8_000, 34_000_000_000
# The smallest units are a bit per second, a byte and a microsecond.
_UNITS: Final[dict[str, dict[str, int]]] = {
    "rate": {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9},
    "size": {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30},
    "time": {"us": 1, "ms": 10**3, "s": 10**6},
}
_EXAMPLES: Final = {"rate": "100mbit", "size": "2GB", "time": "20ms"}
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_MOST_WORKERS: Final = 1_000  # in a host
_LEAST_MEMORY, _MOST_MEMORY = 2**20, 2**50
_LEAST_PROCESSORS, _MOST_PROCESSORS = 0.01, 10_000
# Seconds; netem counts sixteenths of a microsecond in 32 bits.
_LONGEST_DELAY: Final = 60.0
_SHOWN: Final = 60  # characters of a value in a message


@dataclass(frozen=True)
class Host:
    """One host of a cluster.

    >>> lab.Host("a", workers=2, up=100_000_000, down=100_000_000)

    Args:
        name: Name of the host.
        workers: Number of its workers. Default: 1.
        processors: Quota in cores. Default: none.
        memory: Limit in bytes. Default: none.
        up: Rate in bits per second at which it can send. Default: no limit.
        down: Rate in bits per second at which it can receive. Default: no limit.
        delay: Seconds by which each packet from this host is delayed. Default: none.
    """

    name: str
    workers: int = 1
    processors: float | None = None
    memory: int | None = None
    up: Rate | None = None
    down: Rate | None = None
    delay: float | None = None


@dataclass(frozen=True)
class Rack:
    """Hosts behind one shared link.

    >>> lab.Rack("left", hosts=("a", "b"), up=1_000_000_000)

    Data between two hosts of the rack is limited only by the hosts' own links.

    Args:
        name: Name of the rack.
        hosts: Names of its hosts.
        up: Rate in bits per second of all data that leaves the rack. Default: no limit.
        down: Rate in bits per second of all data that enters the rack. Default: no limit.
    """

    name: str
    hosts: tuple[str, ...]
    up: Rate | None = None
    down: Rate | None = None


@dataclass(frozen=True)
class Description:
    """A cluster as plain data.

    >>> lab.Description("mine", hosts=(lab.Host("a"), lab.Host("b", workers=2)))

    Args:
        name: Name of the cluster.
        hosts: Its hosts, 1 to 200.
        racks: Its racks; a host is in one rack at most. Default: none.
        placement: How ranks are dealt to hosts. Default: "block".
        needs_delay: False if the cluster may be built without delays when the kernel has no netem.
            Default: True.
        source: File from which it was read, for messages. Default: none.

    Raises:
        UsageError: A value is impossible; the message names it.
    """

    name: str
    hosts: tuple[Host, ...]
    racks: tuple[Rack, ...] = ()
    placement: Placement = "block"
    needs_delay: bool = True
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check_cluster(self)

    @property
    def workers(self) -> int:
        """Number of workers in all hosts together."""
        return sum(host.workers for host in self.hosts)

    def find(self, name: str) -> int:
        """Find the index of a host by its name, or by the index as text."""
        names = [host.name for host in self.hosts]
        if name in names:
            return names.index(name)
        if name.isdigit() and int(name) < len(names):
            return int(name)
        raise UsageError(f"there is no host {name} in {self.name}; {format_choices(name, names)}")


def parse_rate(value: str | int, where: str = "the bandwidth") -> Rate:
    """Parse a rate, which is text such as `100mbit` or a number of bits per second.

    Args:
        value: The rate.
        where: Name of the value, for messages. Default: "the bandwidth".

    Raises:
        UsageError: The rate can't be parsed, or is out of bounds.
    """
    bits = (
        value
        if isinstance(value, int) and not isinstance(value, bool)
        else _parse_quantity(value, "rate", where)
    )
    if not _SLOWEST <= bits <= _FASTEST:
        raise UsageError(f"{where} is {format_shortly(value)}, and has to be 8kbit to 34gbit")
    return round(bits)


def format_shortly(value: object) -> str:
    """Format a value for a message: on one line, and cut off if it is long."""
    try:
        text = " ".join((value if isinstance(value, str) else repr(value)).split())
    except ValueError:
        # Python refuses to write an integer of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def format_quoted(value: object) -> str:
    """Format a value for a message, with quotes around text."""
    return format_shortly(repr(value) if isinstance(value, str) else value)


def spell_rate(value: Rate | None) -> str:
    """Write a rate with the largest unit that fits, such as `1gbit`."""
    if value is None:
        return "unlimited"
    units = _UNITS["rate"]
    unit = max(
        (unit for unit, size in units.items() if value >= size), key=lambda unit: units[unit]
    )
    return f"{value / units[unit]:g}{unit}"


def make_regular(
    hosts: int, workers: int = 1, *, placement: Placement = "block", **each: Any
) -> Description:
    """Make a cluster of equal hosts, named `host0`, `host1`, and so on.

    Args:
        hosts: Number of hosts, 1 to 200.
        workers: Number of workers on each host. Default: 1.
        placement: How ranks are dealt to hosts. Default: "block".
        each: Properties of each host, written as in a TOML file: bandwidth, up, down, delay,
            processors, memory.
    """
    if not isinstance(hosts, int) or not 1 <= hosts <= MOST_HOSTS:
        raise UsageError(f"hosts is {format_shortly(hosts)}, and has to be 1 to {MOST_HOSTS}")
    reader = _TomlReader("the cluster")
    # The same table that a file would have, so that both are checked by the same code.
    table = {
        "workers": workers,
        **{name: value for name, value in each.items() if value is not None},
    }
    reader.refuse_unknown_keys(table)
    fields = reader.read_host(table, "each host")
    return Description(
        f"{hosts}x{workers}",
        tuple(Host(f"host{index}", **fields) for index in range(hosts)),
        (),
        placement,
    )


def list_ready_clusters() -> list[str]:
    """List the names of the clusters that ship with paceline."""
    return sorted(path.stem for path in CLUSTERS.glob("*.toml"))


def ready(name: str) -> Description:
    """Read a cluster that ships with paceline.

    >>> cluster = lab.ready("two-hosts")
    """
    if name not in list_ready_clusters():
        raise UsageError(
            f"there is no ready-made cluster {name}; "
            f"{format_choices(name, list_ready_clusters())}; "
            "or give the path of a .toml file"
        )
    return read(CLUSTERS / f"{name}.toml")


def find_cluster(text: str) -> Description:
    """Find a cluster by the path of its file, or by the name of a ready-made one."""
    return read(text) if text.endswith(".toml") or "/" in text else ready(text)


def read(path: str | Path) -> Description:
    """Read the cluster in a TOML file.

    >>> cluster = lab.read("cluster.toml")

    Raises:
        UsageError: The file has an error; the message has file, key, value and possible values.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"the cluster file {path} can't be read ({error.strerror}); ready-made clusters: "
            f"{', '.join(list_ready_clusters())}"
        ) from error
    except (ValueError, RecursionError) as error:
        # ValueError: wrong TOML, wrong UTF-8, or a number of thousands of digits. RecursionError: a
        # thousand brackets.
        raise UsageError(f"{path} isn't TOML: {error}") from error
    return _TomlReader(str(path)).read_description(content, Path(path).stem)


def _parse_quantity(value: object, kind: str, where: str) -> float:
    """Parse a number with a unit, and convert it to the smallest unit of its kind."""
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", value.strip())
        if isinstance(value, str)
        else None
    )
    units = _UNITS[kind]
    if match is None or match[2] not in units:
        raise UsageError(
            f"{where} is {format_quoted(value)}, and has to be a number with one of "
            f"{', '.join(units)}, such as {_EXAMPLES[kind]!r}"
        )
    return float(match[1]) * units[match[2]]


class _TomlReader:
    """Turns the tables of a TOML file into data; every message begins with the file's name."""

    _HOST: Final = ("workers", "processors", "memory", "bandwidth", "up", "down", "delay")
    _RACK: Final = ("name", "hosts", "bandwidth", "up", "down")

    def __init__(self, source: str) -> None:
        self._source = source

    def read_description(self, content: Mapping[str, Any], stem: str) -> Description:
        """Read a cluster from a file's content; `stem` is its name unless the content has one."""
        self._refuse_keys(content, ("name", "placement", "delays", "all", "host", "rack"), "")
        shared = self._check_table(content.get("all", {}), "all")
        self.refuse_unknown_keys(shared, "all.")
        hosts = []
        for index, table in enumerate(self._read_tables(content, "host")):
            where = f"host[{index}]"
            self._refuse_keys(table, ("name", *self._HOST), f"{where}.")
            name = self._check_text(table.get("name", f"host{index}"), f"{where}.name")
            # The keys of a host override those that all hosts share.
            hosts.append(
                Host(name, **(self.read_host(shared, "all") | self.read_host(table, where)))
            )
        racks = []
        for index, table in enumerate(self._read_tables(content, "rack")):
            where = f"rack[{index}]"
            self._refuse_keys(table, self._RACK, f"{where}.")
            members = table.get("hosts", [])
            if not isinstance(members, list) or not all(
                isinstance(member, str) for member in members
            ):
                raise self._wrong_value(f"{where}.hosts", members, "a list of names of hosts")
            name = self._check_text(table.get("name", f"rack{index}"), f"{where}.name")
            racks.append(Rack(name, tuple(members), **self._read_limits(table, where)))
        delays = content.get("delays", "needed")
        if delays not in ("needed", "where-possible"):
            raise self._wrong_value("delays", delays, '"needed" or "where-possible"')
        return Description(
            self._check_text(content.get("name", stem), "name"),
            tuple(hosts),
            tuple(racks),
            cast(Placement, content.get("placement", "block")),
            delays == "needed",
            self._source,
        )

    def refuse_unknown_keys(self, table: Mapping[str, Any], prefix: str = "") -> None:
        """Refuse keys that aren't properties of a host."""
        self._refuse_keys(table, self._HOST, prefix)

    def read_host(self, table: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Read the fields of a `Host` from a table, except for its name."""
        fields: dict[str, Any] = self._read_limits(table, where)
        # In Python True is an integer, so each number also has to be no bool.
        if "workers" in table:
            fields["workers"] = workers = table["workers"]
            if (
                not isinstance(workers, int)
                or isinstance(workers, bool)
                or not 1 <= workers <= _MOST_WORKERS
            ):
                raise self._wrong_value(
                    f"{where}.workers",
                    workers,
                    f"a whole number of at least 1, at most {_MOST_WORKERS}",
                )
        if "processors" in table:
            fields["processors"] = cores = table["processors"]
            if (
                not isinstance(cores, int | float)
                or isinstance(cores, bool)
                or not _LEAST_PROCESSORS <= cores <= _MOST_PROCESSORS
            ):
                wanted = (
                    f"a number of cores, at least {_LEAST_PROCESSORS}, at most {_MOST_PROCESSORS}"
                )
                raise self._wrong_value(f"{where}.processors", cores, wanted)
        if "memory" in table:
            memory = table["memory"]
            nbytes = (
                memory
                if isinstance(memory, int)
                else _parse_quantity(memory, "size", self._name_key(f"{where}.memory"))
            )
            if isinstance(memory, bool) or not _LEAST_MEMORY <= nbytes <= _MOST_MEMORY:
                raise self._wrong_value(
                    f"{where}.memory", memory, "at least 1MiB, at most 1048576GiB"
                )
            fields["memory"] = int(nbytes)
        if "delay" in table:
            # From microseconds to seconds.
            fields["delay"] = delay = (
                _parse_quantity(table["delay"], "time", self._name_key(f"{where}.delay")) / 1e6
            )
            if delay > _LONGEST_DELAY:
                raise self._wrong_value(
                    f"{where}.delay", table["delay"], f"at most {_LONGEST_DELAY:g}s"
                )
        return fields

    def _read_limits(self, table: Mapping[str, Any], where: str) -> dict[str, Rate]:
        """Parse the limits of sending and receiving, if given; `bandwidth` sets both."""
        rates = {
            key: parse_rate(table[key], self._name_key(f"{where}.{key}"))
            for key in ("bandwidth", "up", "down")
            if key in table
        }
        bandwidth = rates.pop("bandwidth", None)
        # One direction may be given besides; it overrides the bandwidth.
        return rates if bandwidth is None else {"up": bandwidth, "down": bandwidth} | rates

    def _read_tables(self, content: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        value = content.get(key, [])
        if not isinstance(value, list):
            raise self._wrong_value(key, value, f"tables, each headed by [[{key}]]")
        return [self._check_table(table, key) for table in value]

    def _check_table(self, value: object, key: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong_value(key, value, "a table")
        return value

    def _check_text(self, value: object, key: str) -> str:
        if not isinstance(value, str):
            raise self._wrong_value(key, value, "text")
        return value

    def _refuse_keys(
        self, table: Mapping[str, Any], possible: tuple[str, ...], prefix: str
    ) -> None:
        for key in table:
            if key not in possible:
                raise UsageError(
                    f"{self._source}: there is no key {prefix}{format_shortly(key)}; "
                    f"{format_choices(key, possible)}"
                )

    def _wrong_value(self, key: str, value: object, wanted: str) -> UsageError:
        return UsageError(
            f"{self._name_key(key)} is {format_quoted(value)}, and has to be {wanted}"
        )

    def _name_key(self, key: str) -> str:
        return f"{self._source}: {key}"


def _check_cluster(cluster: Description) -> None:
    """Check a description, however it was made: placement, names, numbers, racks."""
    at = cluster.source or f"cluster {cluster.name}"
    if cluster.placement not in PLACEMENTS:
        raise UsageError(
            f"{at}: placement is '{format_shortly(cluster.placement)}'; "
            f"{format_choices(format_shortly(cluster.placement), PLACEMENTS)}"
        )
    if not 1 <= len(cluster.hosts) <= MOST_HOSTS:
        raise UsageError(
            f"{at}: there are {len(cluster.hosts)} hosts, and there have to be 1 to {MOST_HOSTS}: "
            "add [[host]] tables"
        )
    for kind, names in (
        ("host", [host.name for host in cluster.hosts]),
        ("rack", [rack.name for rack in cluster.racks]),
    ):
        for name in names:
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"{at}: a {kind} is called {format_quoted(name)}; names have small letters, "
                    "digits, and dashes in between, at most 32 characters"
                )
            if names.count(name) > 1:
                raise UsageError(f"{at}: two {kind}s are called {name}: give each its own name")
    for host in cluster.hosts:
        _check_numbers(host, at)
    for rack in cluster.racks:
        for side in ("up", "down"):
            if getattr(rack, side) is not None:
                parse_rate(getattr(rack, side), f"{at}: {side} of rack {rack.name}")
    _check_racks(cluster, at)


def _check_numbers(host: Host, at: str) -> None:
    for side in ("up", "down"):
        if getattr(host, side) is not None:
            parse_rate(getattr(host, side), f"{at}: {side} of host {host.name}")
    bounds = (
        (1, _MOST_WORKERS),
        (_LEAST_PROCESSORS, _MOST_PROCESSORS),
        (_LEAST_MEMORY, _MOST_MEMORY),
        (0, _LONGEST_DELAY),
    )
    for name, (least, most) in zip(
        ("workers", "processors", "memory", "delay"), bounds, strict=True
    ):
        value = getattr(host, name)
        if value is not None and not least <= value <= most:
            raise UsageError(
                f"{at}: {name} of host {host.name} is {format_shortly(value)}, and has to be at "
                f"least {least}, at most {most:g}"
            )


def _check_racks(cluster: Description, at: str) -> None:
    host_names = [host.name for host in cluster.hosts]
    rack_of_host: dict[str, str] = {}
    for rack in cluster.racks:
        if not rack.hosts:
            raise UsageError(f"{at}: rack {rack.name} has no hosts: name them in `hosts`")
        for name in rack.hosts:
            if name not in host_names:
                raise UsageError(
                    f"{at}: rack {rack.name} has a host {format_shortly(name)}, which doesn't "
                    f"exist; {format_choices(name, host_names)}"
                )
            if name in rack_of_host:
                raise UsageError(
                    f"{at}: host {name} is in rack {rack_of_host[name]} and in rack "
                    f"{rack.name}: leave it out of one"
                )
            rack_of_host[name] = rack.name
