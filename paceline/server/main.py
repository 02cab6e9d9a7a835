"""The server process: keeps a shard of the parameters, and answers the requests of workers, one message after the other.

    worker                             server
    plan, fill, remember               what it keeps, and how it begins
    push(unit)       ------------->    kept until the step; acknowledged
    norm             ------------->    the norm of the sums, once all workers' pushes are there
    close(step)      ------------->    the step, once all workers have closed it, or once it is decided who makes it
    apply            ------------->    a step with what this worker alone has pushed
    read(unit, step) ------------->    the parameters, once that step has been taken; or what is new in them, through a codec (`deltas`)
    level            ------------->    from now on workers get the parameters themselves
    memories, facts  ------------->    the state of optimizers; statistics of this server
    absent           ------------->    the workers that have not closed a step yet
    alive, back      ------------->    after a loss: whether it lives; discard this worker's pushes, and undo steps of this turn
    state, become    ------------->    all that is kept, for a copy that has begun

Where workers are not in lockstep, the first server deals them their samples too (`scheduler_rpc`), and each answers the living
after a loss (`fencing`).
What can't be answered yet is put off, and looked at again after each message, and in time; nothing here waits for one worker alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import torch
from torch import Tensor

from paceline.cluster.discover import timings as environment_timings
from paceline.cluster.launcher.janitor import sockets
from paceline.cluster.launcher.worker import preparation
from paceline.comm.rpc import RpcMessage, RpcServer, keys
from paceline.errors import PacelineError, UsageError
from paceline.server.fencing import Fence
from paceline.server.protocol import plans
from paceline.server.scheduler_rpc import SchedulerRpc
from paceline.server.shard import Shard
from paceline.server.table_rpc import TableService
from paceline.state.snapshot import byte_tensor, loads, pack
from paceline.timings import DEFAULTS, ServerTimings
from paceline.trace import Trace

WRONG = (  # the errors that a senseless message causes
    *(LookupError, TypeError, ValueError, ArithmeticError, RuntimeError),
    *(AttributeError, AssertionError, MemoryError, BufferError, struct.error),
)
LATER = 10_000  # messages that are put off
KEPT = 8  # steps whose norms are remembered
SPANS = 5000  # of what it has done last, for the timeline
CHUNK = 1 << 28  # bytes of what is kept that travel as one tensor


def _count(body: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an index that isn't counted from 0 on: Python would count from the end."""
    for name in ("optimizer", "unit", "table"):
        number = body.get(name, 0)
        if type(number) is not int or number < 0:
            raise UsageError(f"there is no {name} {number!r}")


def _in_one_turn(optimizer: int, step: int, turns: Mapping[int, Any]) -> None:
    """Raise `UsageError` if workers make a step of an optimizer in different turns: some have skipped theirs."""
    if len({*map(repr, turns.values())}) > 1:
        sides = ", ".join(f"rank {worker} after {turn} steps of training" for worker, turn in turns.items())
        raise UsageError(
            f"replicas part: step {step} of optimizer {optimizer} is made by {sides}; somebody has skipped a step. Skip a step on all "
            "workers or on none: decide by what all of them have, such as run.mean(loss)"
        )


class Server:
    """Answers messages, until it is asked to end. `over` is asked now and then whether no worker is left."""

    def __init__(self, receiver: RpcServer, over: Callable[[], bool] = lambda: False, *, timings: ServerTimings = DEFAULTS.servers) -> None:
        self._receiver, self._over, self._look = receiver, over, timings.look
        self._shard: Shard | None = None
        self._digest = b""
        self._later: list[RpcMessage] = []  # what can't be answered yet
        self._closing: dict[tuple[int, int], dict[int, Any]] = {}  # by optimizer and step: the workers that have closed it, and how
        self._told: dict[int, Any] = {}  # by optimizer: the arguments of its last step, where any of the agreeing workers makes it
        self._norms: dict[tuple[int, int], dict[float, float]] = {}  # by optimizer and step, and kind
        self._ended = False
        self._kinds: dict[str, Callable[[RpcMessage], bool]] = {
            "plan": self._plan,
            "fill": self._fill,
            "remember": self._remember,
            "push": self._push,
            "norm": self._norm,
            "close": self._close,
            "taken": self._taken,
            "read": self._read,
            "level": self._level,
            "echo": lambda message: self.answer(message, tensors=message.tensors),
            "apply": self._apply,
            "absent": self._absent,
            "alive": lambda message: self.answer(message, {"clock": time.perf_counter_ns()}),
            "timeline": self._timeline,
            "back": self._back,
            "state": self._state,
            "become": self._become,
            "memories": self._memories,
            "facts": self._facts,
            "end": self._end,
        }
        self._dealing, self._reckoning, self._tables = SchedulerRpc(self.answer), Fence(self), TableService()
        self._kinds |= self._dealing.kinds | self._reckoning.kinds
        self._requests = {request.kind: (request, act) for request, act in self._tables.handlers.items()}
        self._first = {"plan", "end", "alive", "echo", "facts", "timeline", *self._requests}  # what may come before there is a shard
        self._done_of: Counter[str] = Counter()  # messages by kind
        self._most, self._busy = 0, 0.0  # messages that were put off at a time; seconds of work
        self._trace = Trace(SPANS)
        self._waiting: deque[tuple[int, int]] = deque(maxlen=SPANS)  # how many are put off, from when on

    def run(self) -> None:
        """Serve."""
        while not self._ended and not self._over():
            found = self._receiver.receive(self._dealing.patience(self._look))
            began, waiting = time.perf_counter_ns(), len(self._later)
            if found is not None and not self._done(found):
                self._put_off(found)
            if self._later:
                self._later = [message for message in self._later if message is found or not self._done(message)]
            self._note(found, began, waiting)

    def _note(self, found: RpcMessage | None, began: int, waiting: int) -> None:
        now = time.perf_counter_ns()
        self._busy += (now - began) / 1e9
        if found is not None:
            kind = found.kind if found.kind in self._kinds.keys() | self._requests.keys() else "unknown"
            self._done_of[kind] += 1
            self._trace.step = found.step
            self._trace.record(kind, "serve", began, now)
        if len(self._later) != waiting:
            self._waiting.append((now, len(self._later)))

    def _put_off(self, message: RpcMessage) -> None:
        if len(self._later) < LATER:
            self._later.append(message)
            self._most = max(self._most, len(self._later))
        else:
            self._receiver.refuse(message, f"{LATER} messages wait here for something that has not come")

    def _done(self, message: RpcMessage) -> bool:
        """Handle a message; whether it was answered, one way or the other."""
        act = self._served if message.kind in self._requests else self._kinds.get(message.kind)
        if act is None or (self._shard is None and message.kind not in self._first):
            self._receiver.refuse(message, "nobody has said yet what is kept here" if act is not None else "there is no such message")
            return True
        try:
            self._reckoning.check(message)
            _count(message.body)
            return act(message)
        except PacelineError as error:
            self._receiver.refuse(message, str(error))
        except WRONG as error:
            why = str(error)[:200]  # torch adds where in its own code it was
            self._receiver.refuse(message, f"it lacks something, or has something else there ({type(error).__name__}: {why})")
        return True

    def _served(self, message: RpcMessage) -> bool:
        """Handle a request; whether there is a reply."""
        request, act = self._requests[message.kind]
        reply = act(message.sender, request.unpack(message.body, message.tensors))
        if reply is not None:
            self._receiver.answer(message, message.kind, *reply.pack())
        return reply is not None

    def answer(self, message: RpcMessage, body: Mapping[str, Any] | None = None, tensors: tuple[Tensor, ...] = ()) -> bool:
        """Answer a message."""
        self._receiver.answer(message, message.kind, body, tensors)
        return True

    @property
    def shard(self) -> Shard:
        """The shard that the server keeps."""
        assert self._shard is not None
        return self._shard

    # ---- how it begins

    def _plan(self, message: RpcMessage) -> bool:
        packed = message.tensors[0].numpy().tobytes()
        digest = hashlib.sha256(packed).digest()
        if self._shard is None:
            self._shard, self._digest = Shard(plans.read(packed)), digest
        elif digest != self._digest:
            raise UsageError("another plan is in use here: workers have prepared different things")
        return self.answer(message)

    def _fill(self, message: RpcMessage) -> bool:
        self.shard.fill(message.body["unit"], message.tensors[0])
        return self.answer(message)

    def _remember(self, message: RpcMessage) -> bool:
        found = loads(message.tensors[0].numpy().tobytes()).unpack()
        self.shard.remember(found["memories"])
        return self.answer(message)

    def _memories(self, message: RpcMessage) -> bool:
        packed = pack({"memories": self.shard.memories()}, copy=False).dumps()
        return self.answer(message, tensors=(byte_tensor(packed),))

    # ---- steps

    def _push(self, message: RpcMessage) -> bool:
        body = message.body
        if not body.get("late") or self.shard.in_time(body["unit"], message.body["step"]):
            keep, turn = bool(body.get("keep")), body.get("turn", 0)
            self.shard.push(body["unit"], message.sender, message.tensors[0], body["used"], keep=keep, turn=turn)
        return self.answer(message)

    def _apply(self, message: RpcMessage) -> bool:
        body = message.body
        factor, part = float(body["factor"]), float(body["part"])
        self.shard.apply(body["optimizer"], message.sender, message.body["step"], factor=factor, part=part, settings=dict(body["settings"]))
        return self.answer(message)

    def _norm(self, message: RpcMessage) -> bool:
        body, shard = message.body, self.shard
        if not body.get("decided"):
            self._next(body["optimizer"], message.body["step"])
            asking = self._closing.setdefault((body["optimizer"], -message.body["step"]), {})
            asking[message.sender] = None
            if any(worker not in asking for worker in body["workers"]):
                return False  # a worker may push something else yet
        elif message.step > shard.steps[body["optimizer"]] + 1:
            return False  # the step before has been decided, too
        elif message.step <= shard.steps[body["optimizer"]] and (body["optimizer"], message.step) not in self._norms:
            raise UsageError(f"step {message.step} of optimizer {body['optimizer']} has been made, and its norm is not known here")
        kind, key = math.inf if body["kind"] is None else float(body["kind"]), (body["optimizer"], body["step"])
        found = self._norms.setdefault(key, {}).get(kind)  # another may have closed the step meanwhile
        if found is None:
            found = self._norms[key][kind] = shard.norm(body["optimizer"], body["workers"], kind)
        self._norms.pop((body["optimizer"], body["step"] - KEPT), None)
        return self.answer(message, {"norm": found})

    def _next(self, optimizer: int, step: int) -> None:
        if step != self.shard.steps[optimizer] + 1:
            raise UsageError(f"step {step} of optimizer {optimizer} can't come after step {self.shard.steps[optimizer]}")

    def _close(self, message: RpcMessage) -> bool:
        body, shard = message.body, self.shard
        optimizer, step, workers = body["optimizer"], message.body["step"], body["workers"]
        if step <= shard.steps[optimizer]:
            self._same(optimizer, step, body)
            return self.answer(message)
        if body.get("decided") and step > shard.steps[optimizer] + 1:
            return False  # the step before has been decided, too
        self._next(optimizer, step)
        settings = {int(group): dict(values) for group, values in body["settings"]}
        float(body["factor"])
        if body.get("decided"):
            part, keep = float(body.get("part", 1.0)), bool(body.get("keep"))
            more: dict[str, Any] = {"undo": bool(body.get("undo")), "turn": body["turn"] if body.get("same") else None}
            shard.close(optimizer, step, workers, factor=float(body["factor"]), settings=settings, part=part, keep=keep, **more)
            self._told[optimizer] = step, body["factor"], body["settings"]
            if "came" in body:
                self._reckoning.journal.made(body)
            return self.answer(message)
        closing = self._closing.setdefault((optimizer, step), {})
        closing[message.sender] = body["factor"], body["settings"], body.get("turn")
        if any(worker not in closing for worker in workers):
            return False
        _in_one_turn(optimizer, step, {worker: closing[worker][2] for worker in workers})
        arguments = [closing[worker][:2] for worker in workers]
        if any(other != arguments[0] for other in arguments):
            raise UsageError(
                f"workers take step {step} of optimizer {optimizer} with different settings, or clipped differently: {arguments}"
            )
        shard.close(optimizer, step, workers, factor=body["factor"], settings=settings, turn=body.get("turn"))
        self._closing = {key: found for key, found in self._closing.items() if key not in ((optimizer, step), (optimizer, -step))}
        return self.answer(message)

    def _taken(self, message: RpcMessage) -> bool:
        return message.body["step"] <= self.shard.steps[message.body["optimizer"]] and self.answer(message)

    def _same(self, optimizer: int, step: int, body: Mapping[str, Any]) -> None:
        mine = step, body["factor"], body["settings"]
        made = self._told.get(optimizer, mine)
        if body.get("same") and made[0] == step and made != mine:
            arguments = [*made[1:], *mine[1:]]
            raise UsageError(
                f"workers take step {step} of optimizer {optimizer} with different settings, or clipped differently: {arguments}"
            )

    def _read(self, message: RpcMessage) -> bool:
        unit, step = message.body["unit"], message.body["step"]
        flat = self.shard.read(unit)
        done = self.shard.steps[self.shard.units[unit].optimizer]
        if step > done + 1 and not message.body.get("copy"):
            raise UsageError(f"unit {unit} can't be read after step {step}: {done} have been taken")
        if step > done:
            return False
        coded = self.shard.units[unit].coded
        if coded is not None and "has" in message.body:
            has, turn = message.body["has"], message.body.get("turn")
            return self.answer(message, *(coded.read(has) if turn is None else coded.read_apart(message.sender, has, turn)))
        return self.answer(message, tensors=(flat.clone() if message.body.get("copy") else flat,))  # others may step while it is sent

    def _level(self, message: RpcMessage) -> bool:
        self.shard.level()
        return self.answer(message)

    def _absent(self, message: RpcMessage) -> bool:
        optimizer, step = message.body["optimizer"], message.body["step"]
        came = self._closing.get((optimizer, step), {})
        missing = [(worker, self.shard.steps[optimizer]) for worker in message.body["workers"] if worker not in came]
        return self.answer(message, {"missing": missing})

    # ---- losses

    def _back(self, message: RpcMessage) -> bool:
        """Begin a turn again: discard this worker's pushes for it, and undo the steps that were made in it, if not done yet."""
        for optimizer, step in message.body["steps"]:
            self.shard.back(optimizer, step)
        self.shard.drop(message.sender)
        self._norms.clear()
        return self.answer(message)

    def _state(self, message: RpcMessage) -> bool:
        kept = {**self.shard.state_dict(), "ledger": self._reckoning.journal.dump()}
        whole = byte_tensor(pack(kept, copy=False).dumps())
        return self.answer(message, tensors=whole.split(CHUNK))

    def _become(self, message: RpcMessage) -> bool:
        state = loads(b"".join(part.numpy().tobytes() for part in message.tensors)).unpack()
        self.shard.load_state_dict(state)
        self._reckoning.journal.load(state["ledger"])
        return self.answer(message)

    def clear(self) -> None:
        """Discard delayed messages, and the norms of steps that may change."""
        self._later.clear()
        self._norms = {key: found for key, found in self._norms.items() if key[1] <= self.shard.steps[key[0]]}

    def _timeline(self, message: RpcMessage) -> bool:
        packed = msgpack.packb([[list(span) for span in self._trace.spans()], list(self._waiting)])
        return self.answer(message, tensors=(byte_tensor(packed),))

    def _facts(self, message: RpcMessage) -> bool:
        facts = {
            "messages": dict(self._done_of),
            "put_off": self._most,
            "busy_seconds": self._busy,
            "bytes": self._receiver.nbytes,
            "bytes_sent": self._receiver.sent,
            "memory_bytes": self._tables.nbytes + (0 if self._shard is None else self._shard.nbytes),
            **({} if self._shard is None else self._dealing.scheduler.facts()),
            **self._tables.facts(),
        }
        return self.answer(message, facts)

    def _end(self, message: RpcMessage) -> bool:
        self._ended = True
        return self.answer(message)


def main() -> None:
    """Run a server process: reads from stdin where to listen, writes to stdout where it does; ends with its parent, or with a launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends after its workers
    asked = json.loads(sys.stdin.buffer.readline())
    prepare = preparation(asked["parent"]) if "parent" in asked else None
    if prepare is not None:
        prepare()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _warm_up()
    folder = tempfile.mkdtemp(prefix=sockets(os.environ.get("PACELINE_JOB", "")))
    poll = select.poll()
    poll.register(sys.stdin.fileno() if "parent" in asked else os.pidfd_open(asked["launcher"]), select.POLLIN | select.POLLHUP)
    try:
        path = os.path.join(folder, "server")
        given = environment_timings().servers
        known = keys(bytes.fromhex(asked["secret"]), asked["job"])
        receiver = RpcServer(known, hosts=asked["hosts"], path=path, say=_say, timings=given)
        with contextlib.closing(receiver):
            print(json.dumps(receiver.addresses), flush=True)
            Server(receiver, lambda: bool(poll.poll(0)), timings=given).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _warm_up() -> None:
    """Load what torch loads with its first optimizer, which takes a second or two: workers may wait for the first plan."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the server may outlive the reader
        print(f"paceline: a server: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
