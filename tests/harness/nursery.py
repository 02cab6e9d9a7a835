"""Where launchers and servers under test come from that needn't start by themselves: one process
that has torch, and forks.

Importing torch takes most of the processor time of a job under test: a job of two hosts and two
servers does it four times, also with `tests.harness.preloaded`. The nursery does it once for all
tests, also where several processes run them. It begins with the first job that asks for it, and
ends with the tests. Jobs come from here unless a test is marked `real_processes`: how programs
start is its subject.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple, NoReturn

import typer

from paceline.lab.enter import enter_host
from tests.harness import preloaded

ROOM = 1 << 16  # for the arguments, and the environment, of what is forked: bytes
SECONDS = 120.0  # in which it has forked, if it had to begin first on a busy machine
COLLAPSE, LARGE = 25, 1 << 21  # the advice that makes a large page of small ones, and its bytes
DESCRIPTORS = 16  # at most: input, output, errors, and namespaces
USUAL = (  # what many jobs load as they go: here it is there for all
    "encodings.idna",
    "numpy.random",
    "paceline.apps.gpt",
    "paceline.lab.hosts",
    "paceline.observe.layout_report",
    "paceline.parallel.pipeline",
    "paceline.parallel.shard",
    "paceline.parallel.tensor.tensor_cut",
    "paceline.session.load",
    "paceline.session.cluster_probe",
    "paceline.sync.localsgd.strategy",
    "paceline.servers.worker.strategy",
    "tests.harness.pipelines",
    "torch.fx.experimental.symbolic_shapes",  # of a backward that is given gradients: sympy
    "torch.utils.serialization.config",
)


class Door(NamedTuple):
    """How a process gets into a host of a lab: the kinds of its namespaces, and the files to
    write its number to.
    """

    kinds: tuple[str, ...] = ()
    cgroups: str = "-"


class Nursed:
    """What tests, and what starts servers, need of `subprocess.Popen`. From any thread."""

    def __init__(
        self,
        path: str,
        command: Sequence[str],
        given: Sequence[int],
        *,
        cwd: str,
        env: Mapping[str, str],
        **rest: Any,
    ) -> None:
        """`given`: input, output, errors, and namespaces; `rest`: see `_live`."""
        self.args = command
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        self.stderr: IO[Any] | None = None
        self._lock, self._readers, self._parts = (
            threading.Lock(),
            list[threading.Thread](),
            (list[str](), list[str]()),
        )
        self._wire = socket.socket(socket.AF_UNIX)
        self._wire.settimeout(SECONDS)
        self._wire.connect(path)
        asked = json.dumps(
            {"command": list(command), "cwd": cwd, "env": dict(env), **rest}
        ).encode()
        socket.send_fds(self._wire, [len(asked).to_bytes(8, "little")], given)
        self._wire.sendall(asked)
        self.pid = int.from_bytes(_exactly(self._wire, 8), "little")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code once it has ended; below 0 the signal that ended it."""
        with self._lock:
            if self.returncode is None and _readable(self._wire, 0):
                self.returncode = os.waitstatus_to_exitcode(
                    int.from_bytes(_exactly(self._wire, 8), "little")
                )
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same, once it has ended. Raises `subprocess.TimeoutExpired`."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            _readable(self._wire, left)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it writes until its end.

        Raises `subprocess.TimeoutExpired` with what it has written, and may be called again then.
        """
        until = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            for stream, parts in zip((self.stdout, self.stderr), self._parts, strict=True):
                self._readers.append(
                    threading.Thread(target=_collect, args=(stream, parts), daemon=True)
                )
                self._readers[-1].start()
        for reader in self._readers:
            reader.join(None if until is None else max(until - time.monotonic(), 0))
        out, err = ("".join(parts) for parts in self._parts)
        if any(reader.is_alive() for reader in self._readers):
            raise subprocess.TimeoutExpired(self.args, timeout or 0, out.encode(), err.encode())
        self.wait(None if until is None else max(until - time.monotonic(), 0.1))
        return out, err


def _collect(stream: IO[str], parts: list[str]) -> None:
    for line in stream:
        parts.append(line)
    stream.close()


def _readable(wire: socket.socket, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(wire, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def _exactly(wire: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = wire.recv(count - len(data))
        assert more, "the nursery has ended"
        data += more
    return data


@functools.cache
def path() -> str:
    """Where the nursery of these tests listens; it begins if there is none.

    Processes of pytest-xdist share one.

    It reads a pipe that has a name, to which all that use it hold the writing end, and ends with
    the last of them.
    """
    name = os.path.join(
        tempfile.gettempdir(),
        f"paceline-nursery-{os.environ.get('PYTEST_XDIST_TESTRUNUID', uuid.uuid4().hex)}",
    )
    while True:
        with open(name + ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # a nursery has ended while this process waited, and has taken it away
            if os.fstat(lock.fileno()).st_nlink == 0:
                continue
            try:
                held = os.open(name + ".users", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads, as there is none
                held = _begin(name)
        # before the nursery is waited for, as what is registered last is called first
        atexit.register(os.close, held)
        return name + ".socket"


def _begin(name: str) -> int:
    """Start the nursery; return the writing end of the pipe of its users."""
    for kind in (".users", ".socket"):  # of one that was killed
        Path(name + kind).unlink(missing_ok=True)
    os.mkfifo(name + ".users")
    read = os.open(name + ".users", os.O_RDONLY | os.O_NONBLOCK)
    held = os.open(name + ".users", os.O_WRONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name + ".socket")
        listener.listen(64)
        command = [
            sys.executable,
            "-m",
            "tests.harness.nursery",
            name + ".socket",
            str(listener.fileno()),
            " " * ROOM,
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", preloaded.ROOM: " " * ROOM}
        process = subprocess.Popen(command, stdin=read, env=environ, pass_fds=[listener.fileno()])
    os.close(read)
    atexit.register(process.wait)
    return held


def _ends(home: str, users: select.poll) -> bool:
    """Whether the nursery is over: nobody uses it, and nobody will, as its files are gone."""
    name = home.removesuffix(".socket")
    with open(name + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not users.poll(0):  # somebody has come in this moment
            return False
        for kind in (".users", ".socket", ".lock"):
            Path(name + kind).unlink(missing_ok=True)
    return True


def launcher(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], group: int | None = None
) -> Nursed:
    """A launcher, or another script, from the nursery; what it writes is text.

    `group`: its process group, 0 for one of its own.
    """
    out, err = os.pipe(), os.pipe()
    try:
        process = Nursed(path(), command, (0, out[1], err[1]), cwd=str(cwd), env=env, group=group)
    finally:
        os.close(out[1])
        os.close(err[1])
    process.stdout, process.stderr = os.fdopen(out[0]), os.fdopen(err[0])
    return process


def run_script(
    path: Path, folder: Path, *words: str, seconds: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, as `python PATH WORDS` in this folder would."""
    process = launcher([sys.executable, str(path), *words], cwd=folder, env=os.environ)
    try:
        out, err = process.communicate(seconds)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def on_host(
    command: Sequence[str], *, home: str | None = None, **options: Any
) -> subprocess.Popen[bytes] | Nursed:
    """What `lab.Cluster.spawn` starts: launchers come from the nursery (`home`: where it
    listens), and enter their host as they would.
    """
    at = next((n for n, word in enumerate(command) if Path(word).name == "enter.py"), None)
    if at is None or list(command[at + 4 : at + 8]) != ["-P", "-m", "paceline", "run"]:
        return subprocess.Popen(command, **options)
    kinds, paths = zip(*(part.split("=") for part in command[at + 1].split(",")), strict=True)
    null, out, err = os.open(os.devnull, os.O_RDONLY), os.pipe(), os.pipe()
    given = (null, out[1], err[1], *(int(path.rpartition("/")[2]) for path in paths))
    try:
        door = Door(kinds, command[at + 2])
        process = Nursed(
            home or path(),
            [sys.executable, "paceline", *command[at + 7 :]],
            given,
            cwd=str(options["cwd"] or os.getcwd()),
            env=options["env"],
            group=options["process_group"],
            door=door,
        )
    finally:
        for descriptor in given[:3]:
            os.close(descriptor)
    process.stdout, process.stderr = (
        os.fdopen(out[0], "rb", buffering=0),
        os.fdopen(err[0], "rb", buffering=0),
    )
    return process


class Server(Nursed):
    """A server, as `paceline.servers.server_starter` starts one."""

    home = ""  # where the nursery listens, of which this process is a child
    door = Door()  # by which it has entered its host

    def __init__(self, command: Sequence[str], *, process_group: int | None, **rest: Any) -> None:
        assert (
            rest == {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            and command[-1] == "paceline.servers.process.main"
        ), command
        told, out = os.pipe(), os.pipe()
        group = os.getpgid(0) if process_group is None else process_group
        try:
            spaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in self.door.kinds]
            given = (told[0], out[1], 2, *spaces)
            super().__init__(
                self.home,
                command,
                given,
                cwd=os.getcwd(),
                env=os.environ,
                group=group,
                door=self.door,
            )
        finally:
            for descriptor in (told[0], out[1], *spaces):
                os.close(descriptor)
        self.stdin, self.stdout = os.fdopen(told[1], "wb"), os.fdopen(out[0], "rb")


# ---- the nursery itself


def serve(home: str, listener: socket.socket) -> None:
    """Fork whatever is asked for, and tell how it has ended, until the tests are over."""
    alive: dict[int, socket.socket] = {}
    wake, waker = os.pipe()
    for descriptor in (wake, waker):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    poll = select.poll()
    for watched in (0, wake, listener.fileno()):
        poll.register(watched, select.POLLIN | select.POLLHUP)
    users = select.poll()
    users.register(0, select.POLLHUP)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if 0 in ready and _ends(home, users):
            return
        if wake in ready:
            os.read(wake, 1 << 12)
        for pid, status in _ended():
            with alive.pop(pid) as wire, contextlib.suppress(OSError):  # who has asked may be gone
                wire.sendall(status.to_bytes(8, "little"))
        if listener.fileno() in ready:
            wire, _ = listener.accept()
            wire.settimeout(5.0)
            given: list[int] = []
            try:
                head, given, _, _ = socket.recv_fds(wire, 8, DESCRIPTORS)
                asked = json.loads(_exactly(wire, int.from_bytes(head, "little")))
                pid = _fork(home, asked, given, [listener, wire, *alive.values()])
                alive[pid] = wire
                wire.sendall(pid.to_bytes(8, "little"))
            except (AssertionError, OSError):  # whoever asked has ended in the middle
                continue
            finally:
                for descriptor in given:
                    os.close(descriptor)


def _ended() -> Iterator[tuple[int, int]]:
    """Which children have ended, and how."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _fork(
    home: str, asked: dict[str, Any], given: Sequence[int], mine: Sequence[socket.socket]
) -> int:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, preloaded.SIGNALS)
    pid = os.fork()
    if pid == 0:
        try:
            for wire in mine:
                # their descriptors are closed: nobody may close what has these numbers next
                wire.detach()
            preloaded.keep(given[:3], given[3:])
            preloaded.reset(before)
            _live(home, given[3:], **asked)
        finally:
            preloaded.abandon()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _live(
    home: str,
    spaces: Sequence[int],
    *,
    command: list[str],
    cwd: str,
    env: dict[str, str],
    group: int | None = None,
    door: Sequence[Any] = Door(),
) -> NoReturn:
    """Be the launcher, server or script that was asked for; in a process group of another, and
    on a host of a lab, if that was said.
    """
    os.chdir(cwd)
    if group is not None:
        os.setpgid(0, group)
    if door[0]:
        enter_host(
            ",".join(
                f"{kind}=/proc/self/fd/{space}" for kind, space in zip(door[0], spaces, strict=True)
            ),
            door[1],
        )
    # of `paceline lab run`, and of scripts that build labs
    hosts = importlib.import_module("paceline.lab.hosts")
    hosts.subprocess = SimpleNamespace(
        **{**vars(subprocess), "Popen": functools.partial(on_host, home=home)}
    )  # type: ignore[attr-defined]
    if command[1].endswith(".py") and command[1] != preloaded.__file__:
        preloaded.become(command, env)
    if command[-1] == "paceline.servers.process.main":
        program = importlib.import_module("paceline.servers.process.main")
        # the nursery is its parent; it ends with its input
        program.make_preparation = lambda parent: None
    else:
        program = importlib.import_module("paceline.cli")
        Server.home, Server.door = home, Door(*door)
        preloaded.fork_workers(servers=Server)
    preloaded.live(env, command, program.main)


def _enlarge() -> None:
    """Have the memory of this process in large pages (Linux 6.1; elsewhere it stays as it is): a
    fork copies a table of each page.
    """
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()
        start, end = (int(word, 16) for word in words[0].split("-"))
        if words[1] == "rw-p" and words[5:] in ([], ["[heap]"]):
            for large in range(-(-start // LARGE) * LARGE, end - LARGE + 1, LARGE):
                advise(ctypes.c_void_p(large), ctypes.c_size_t(LARGE), COLLAPSE)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    preloaded.load("paceline.servers.process.main", "paceline.cli", *USUAL)
    probing = importlib.import_module("paceline.session.cluster_probe")
    probing.COMPUTING, probing.TURNS, probing.compute.COPIED = (
        1.0,
        2,
        1 << 22,
    )  # what jobs measure is asked for, and not whether it is exact
    commands = typer.main.get_command(importlib.import_module("paceline.cli").app)
    commands.commands["run"].make_context("run", ["script.py"])  # loads what words are read with
    # a launcher would make it anew in more time than it works
    typer.main.get_command = lambda app: commands
    _enlarge()
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
