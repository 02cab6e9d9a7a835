"""The table service of a server: its messages, and when each is answered. Workers step a table together, in lockstep.

worker                               server
rows.table            ----------->   what the table is
rows.pull(step)       ----------->   the rows, once that step has been taken: may be asked for before
rows.give(step)       ----------->   some rows and their gradients, acknowledged; the last worker's is followed by the step
rows.digest, .part    ----------->   what is in use, and in which state, once the step has been taken
rows.clear, .put      ----------->   what was saved comes back

Where losses are survived, what is given makes no step by itself:

rows.give(step)       ----------->   acknowledged
rows.make(step)       ----------->   all have decided that it is made: the first to say so makes it
rows.back(step)       ----------->   the turn comes again: so many steps have been made, and no more
rows.stand, .become   ----------->   what a table is and how far, for a copy that has begun; its rows follow by rows.part and .put

Workers say there how many calls they have completed together (`calls`): a push of a lost worker for a discarded turn may come
after others have gone on, and does nothing then.

Workers that are not in lockstep have no step in common that they wait for, so a pull may have later ones in it:

rows.apply            ----------->   a step with this gradient alone
rows.hold(after)      ----------->   kept, in place of what this worker held, once that step has been made
rows.close(step)      ----------->   the step is made by these workers, with what is held of them: the first to say so makes it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from paceline.comm.rpc import RpcMessage
from paceline.errors import Mismatch, UsageError
from paceline.server.table import RowsBefore, TableShard, TableSpec

Answer = Callable[[RpcMessage, Mapping[str, Any], tuple[Tensor, ...]], bool]  # gives True


class RowGradient(NamedTuple):
    """The gradient of one worker for one step."""

    ids: Tensor
    grad: Tensor
    used: bool  # whether a backward of it has reached the table
    settings: dict[str, Any] | None  # where they are others than before


class RowStep(NamedTuple):
    """A step that may be undone."""

    step: int
    calls: int  # when it was made
    before: RowsBefore


@dataclass
class ServedTable:
    """A table, with the step that it is at and the gradients for the next."""

    table: TableShard
    step: int = 0
    given: dict[int, RowGradient] = field(default_factory=dict)  # for the next step, by worker
    broken: str = ""  # why there can't be a next step
    made: list[RowStep] = field(default_factory=list)  # in the turn under way
    discarded: int = -1  # calls when a turn was discarded last
    held: dict[int, RowGradient] = field(default_factory=dict)  # out of lockstep, by worker: what it has come with, and is in no step yet
    alone: Counter[int] = field(default_factory=Counter)  # out of lockstep, by worker: the steps that it has made alone


class TableService:
    """The tables of one server. `kinds` are its messages: each says whether it was answered, or has to wait."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._shelves: dict[int, ServedTable] = {}
        self.kinds: dict[str, Callable[[RpcMessage], bool]] = {
            "rows.table": self._table,
            "rows.pull": self._pull,
            "rows.give": self._give,
            "rows.given": self._given,
            "rows.make": self._make,
            "rows.back": self._back,
            "rows.stand": self._stand,
            "rows.become": self._become,
            "rows.apply": self._apply,
            "rows.hold": self._hold,
            "rows.close": self._close,
            "rows.digest": self._digest,
            "rows.part": self._part,
            "rows.clear": self._clear,
            "rows.put": self._put,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of rows in use, of their optimizer state, and of gradients for the next steps."""
        given = [
            tensor
            for shelf in self._shelves.values()
            for found in (*shelf.given.values(), *shelf.held.values())
            for tensor in (found.ids, found.grad)
        ]
        return sum(shelf.table.nbytes for shelf in self._shelves.values()) + sum(tensor.nbytes for tensor in given)

    def facts(self) -> dict[str, Any]:
        """Return the statistics for the summary: how many rows are in use."""
        return {"rows": sum(len(shelf.table) for shelf in self._shelves.values())} if self._shelves else {}

    def _shelf(self, number: int) -> ServedTable:
        if number not in self._shelves:
            raise Mismatch(f"there is no table {number} here: there are {len(self._shelves)}")
        return self._shelves[number]

    def _stands(self, message: RpcMessage) -> ServedTable | None:
        """Return the table of this message if it is at the step that the message waits for, and workers are in lockstep."""
        shelf, step, free = self._shelf(message.body["table"]), message.body["step"], message.body.get("free")
        if shelf.broken:
            raise UsageError(shelf.broken)
        if free:
            return shelf if step <= (shelf.alone[message.sender] if free == "alone" else shelf.step) else None
        if step < shelf.step:
            raise Mismatch(f"table {message.body['table']} is asked for as it was after step {step}, and {shelf.step} have been taken")
        return shelf if step == shelf.step else None

    def _table(self, message: RpcMessage) -> bool:
        body, spec = message.body, TableSpec(**message.body["spec"])
        found = self._shelves.get(body["table"])
        if found is None:
            self._shelves[body["table"]] = ServedTable(TableShard(spec, body["settings"], server=body["server"], servers=body["servers"]))
        elif found.table.spec != spec or found.table.settings != body["settings"]:
            raise UsageError(f"workers have prepared different tables: {found.table.spec} and {spec}")
        return self._answer(message, {}, ())

    def _pull(self, message: RpcMessage) -> bool:
        shelf = self._stands(message)
        return shelf is not None and self._answer(message, {}, (shelf.table.read(message.tensors[0]),))

    # ---- steps

    def _entries(self, message: RpcMessage) -> list[tuple[ServedTable, RowGradient]]:
        """Return the gradients in a worker's message, for each of its tables."""
        found = []
        for number, entry in enumerate(message.body["tables"]):
            ids, grad = message.tensors[2 * number : 2 * number + 2]
            found.append((self._shelf(entry["table"]), RowGradient(ids, grad, entry["used"], entry["settings"])))
        return found

    def _give(self, message: RpcMessage) -> bool:
        body, found = message.body, self._entries(message)
        if any(entry["step"] > shelf.step + 1 for entry, (shelf, _) in zip(body["tables"], found, strict=True)):
            return False  # a worker has not given anything for the step before
        for entry, (shelf, given) in zip(body["tables"], found, strict=True):
            if shelf.broken:
                raise UsageError(shelf.broken)
            decided = bool(body.get("decided"))  # by others whether the step is made: what is given again counts in place of the first
            if entry["step"] != shelf.step + 1 or (message.sender in shelf.given and not decided):
                raise Mismatch(f"worker {message.sender} gives step {entry['step']} of table {entry['table']}, which it has given before")
            shelf.given[message.sender] = given
            if not decided and all(worker in shelf.given for worker in body["workers"]):
                self._step(entry["table"], shelf, body["workers"])
        return self._answer(message, {}, ())

    def _given(self, message: RpcMessage) -> bool:
        """Answer which workers have given a gradient for the next step: a worker that waits in vain wants to know."""
        return self._answer(message, {"workers": sorted(self._shelf(message.body["table"]).given)}, ())

    def _step(self, number: int, shelf: ServedTable, workers: list[int], *, undo: bool = False) -> RowsBefore:
        """Take the step, in the order of the workers: all are here."""
        found = [shelf.given[worker] for worker in workers]
        told = found[0].settings
        if any(given.settings != told for given in found):
            sides = "; ".join(f"worker {worker}: {given.settings}" for worker, given in zip(workers, found, strict=True))
            shelf.broken = f"workers step table {number} with different settings ({sides}): let schedules be alike on all of them"
            raise UsageError(shelf.broken)
        if any(given.used for given in found):
            before = shelf.table.step([(given.ids, given.grad) for given in found], told, undo=undo)
        else:
            before = shelf.table.change(told)
        shelf.given, shelf.step = {}, shelf.step + 1
        return before

    # ---- out of lockstep

    def _apply(self, message: RpcMessage) -> bool:
        for shelf, given in self._entries(message):
            _free_step(shelf.table, [given], message.body)
            shelf.alone[message.sender] += 1
        return self._answer(message, {}, ())

    def _hold(self, message: RpcMessage) -> bool:
        entries, after = self._entries(message), message.body["after"]
        if any(shelf.step < after for shelf, _ in entries):
            return False  # what it held before may be in that
        for shelf, given in entries:
            shelf.held[message.sender] = given
        return self._answer(message, {}, ())

    def _close(self, message: RpcMessage) -> bool:
        body = message.body
        for number in body["tables"]:
            shelf = self._shelf(number)
            if body["step"] <= shelf.step:
                continue
            if body["step"] > shelf.step + 1:
                return False  # the step before has been decided, too
            absent = [worker for worker in body["workers"] if worker not in shelf.held]
            if absent or not body["workers"]:
                raise Mismatch(f"workers {absent} have come with nothing for step {body['step']} of table {number}")
            _free_step(shelf.table, [shelf.held.pop(worker) for worker in body["workers"]], body)
            shelf.step = body["step"]
        return self._answer(message, {}, ())

    # ---- where losses are survived

    def _make(self, message: RpcMessage) -> bool:
        body = message.body
        for entry in body["tables"]:
            shelf = self._shelf(entry["table"])
            if shelf.broken:
                raise UsageError(shelf.broken)
            if body["calls"] <= shelf.discarded or entry["step"] <= shelf.step:
                continue
            if entry["step"] > shelf.step + 1:
                raise Mismatch(f"step {entry['step']} of table {entry['table']} can't be made: {shelf.step} have been taken")
            if any(worker not in shelf.given for worker in body["workers"]):
                return False  # losses are not survived yet
            before = self._step(entry["table"], shelf, body["workers"], undo=True)
            shelf.made = [made for made in shelf.made if made.step > entry["floor"]]
            shelf.made.append(RowStep(entry["step"], body["calls"], before))
        return self._answer(message, {}, ())

    def _back(self, message: RpcMessage) -> bool:
        body = message.body
        for number, step in body["tables"]:
            shelf = self._shelf(number)
            shelf.discarded = max(shelf.discarded, body["calls"])
            while shelf.made and shelf.made[-1].step > step and shelf.made[-1].calls <= body["calls"]:
                made = shelf.made.pop()
                shelf.table.back(made.before)
                shelf.step = made.step - 1
        return self._answer(message, {}, ())

    def _stand(self, message: RpcMessage) -> bool:
        shelf = self._shelf(message.body["table"])
        table = shelf.table
        found = {"spec": table.spec.plain(), "settings": table.settings, "count": table.count, "step": shelf.step, "void": shelf.discarded}
        return self._answer(message, found, ())

    def _become(self, message: RpcMessage) -> bool:
        body = message.body
        table = TableShard(TableSpec(**body["spec"]), body["settings"], server=body["server"], servers=body["servers"])
        table.count = body["count"]
        self._shelves[body["table"]] = ServedTable(table, body["step"], discarded=body["void"])
        return self._answer(message, {}, ())

    # ---- state

    def _digest(self, message: RpcMessage) -> bool:
        shelf = self._stands(message)
        if shelf is None:
            return False
        table = shelf.table
        return self._answer(message, {"digest": f"{table.fingerprint():016x}", "rows": len(table), "count": table.count}, ())

    def _part(self, message: RpcMessage) -> bool:
        shelf = self._stands(message)
        if shelf is None:
            return False
        part = shelf.table.part(message.body["start"], message.body["stop"])
        return self._answer(message, {"names": list(part)}, tuple(x.clone() for x in part.values()))

    def _clear(self, message: RpcMessage) -> bool:
        shelf = self._stands(message)
        if shelf is None:
            return False
        shelf.table.forget(message.body["seed"], message.body["count"])
        shelf.held.clear()
        return self._answer(message, {}, ())

    def _put(self, message: RpcMessage) -> bool:
        self._shelf(message.body["table"]).table.put(dict(zip(message.body["names"], message.tensors, strict=True)))
        return self._answer(message, {}, ())


def _free_step(table: TableShard, found: Sequence[RowGradient], how: Mapping[str, Any]) -> None:
    """Step with the settings of the first worker, whose schedule may be elsewhere than that of the others."""
    told = found[0].settings
    if any(given.used for given in found):
        table.step([(given.ids, given.grad) for given in found], told, factor=float(how["factor"]), part=float(how["part"]))
    else:
        table.change(told)
