"""Sparse tables, seen from a worker: a batch pulls the rows that it uses, and what it adds to their gradients is given back.

    forward   pull(ids) ------ rows as of my last step ------>   | loss, backward | give(ids, gradients) ... the servers step
    prefetch       pull(ids of the next batch), answered as soon as that step has been taken

Any number of tables share the servers of a run; row r lies on server r % servers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import DeadlineExceeded, UsageError
from paceline.sync import rows
from paceline.sync.base import Scene
from paceline.sync.parcels import Wires
from paceline.sync.table import Spec

PART_BYTES = 32 << 20  # of the values that travel in one message when tables are saved


class Asked(NamedTuple):
    """Rows that are on their way."""

    step: int
    ids: Tensor
    parts: list[tuple[int, Tensor, int]]  # server, which of the ids, the number of the message


class Gradient(NamedTuple):
    """What this worker adds to the gradient of a table: rows (in order, each once), and theirs; `used`: whether a backward reached it."""

    ids: Tensor
    values: Tensor
    used: bool


class Library:
    """The servers of all tables of a run, as this worker reaches them."""

    def __init__(self, scene: Scene, servers: int | None) -> None:
        if scene.servers is None:
            raise UsageError("sparse tables need servers, and nobody starts any here: start the workers with `paceline run`")
        self.scene = scene
        self._wires = Wires()
        scene.sides.append(self._wires)
        self._room = scene.servers(servers, 1)
        self._wires.open(self._room, scene.group.rank)
        self._given: list[tuple[int, int]] = []  # server and message: what was not acknowledged yet
        self.tables: list[Lookup] = []

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._wires.callers)

    def open(self, name: str, spec: Spec, settings: dict[str, Any]) -> Lookup:
        """Another table, which all workers open."""
        number = len(self.tables)
        for server in range(self.servers):
            body = {"table": number, "spec": spec.plain(), "settings": settings, "server": server, "servers": self.servers}
            self.call(server, "rows.table", body)
        self.tables.append(Lookup(self, name, number, spec, settings))
        return self.tables[-1]

    def send(self, server: int, kind: str, body: dict[str, Any], tensors: Sequence[Tensor] = ()) -> int:
        """A message, whose number it gives."""
        return self._wires.callers[server].send(kind, body=body, tensors=tensors, seconds=self.scene.deadline)

    def wait(self, server: int, message: int) -> Any:
        """Its answer."""
        return self._wires.callers[server].wait(message, self.scene.deadline)

    def call(self, server: int, kind: str, body: dict[str, Any], tensors: Sequence[Tensor] = ()) -> Any:
        """`send`, and `wait`."""
        return self.wait(server, self.send(server, kind, body, tensors))

    def split(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each server that has some of these rows, and which."""
        if self.servers == 1:
            yield from [(0, torch.arange(len(ids)))] if len(ids) else []
            return
        owner = ids % self.servers
        found = ((server, (owner == server).nonzero()[:, 0]) for server in range(self.servers))
        yield from ((server, where) for server, where in found if len(where))

    def give(self, found: Sequence[tuple[Lookup, Gradient, dict[str, Any]]]) -> None:
        """My part of the next step of these tables, with the settings that it is taken with. All workers do so; waits for nobody."""
        self.settle()
        parts = [dict(self.split(gradient.ids)) for _, gradient, _ in found]
        nothing = torch.empty(0, dtype=torch.int64)
        entries = [lookup.entry(gradient, settings) for lookup, gradient, settings in found]
        workers = list(range(self.scene.group.size))
        for server in range(self.servers):
            tensors = []
            for (_, gradient, _), part in zip(found, parts, strict=True):
                where = part.get(server, nothing)
                tensors += [gradient.ids[where], gradient.values[where]]
            self._given.append((server, self.send(server, "rows.give", {"workers": workers, "tables": entries}, tensors)))
        for lookup, _, _ in found:
            lookup.advance()

    def settle(self) -> None:
        """What was given has arrived."""
        while self._given:
            self.wait(*self._given.pop())

    def close(self) -> None:
        """Hang up, and end the servers that this worker has started."""
        self._wires.close()
        self._room.close()


class Lookup:
    """One table. `waits` counts the times that rows had to be waited for from the asking on, `steps` what this worker has given."""

    def __init__(self, library: Library, name: str, number: int, spec: Spec, settings: dict[str, Any]) -> None:
        self.name, self.spec, self.steps, self.waits = name, spec, 0, 0
        self.seconds = 0.0  # spent waiting for rows
        self._library, self._number, self._told = library, number, settings
        self._ahead: list[Asked] = []
        self._trained = False  # rows were pulled for training since the last step

    def pull(self, ids: Tensor, *, train: bool) -> Tensor:
        """The rows of these ids (1-D, int64, in order, each once), as they are after my last step; in memory of their own."""
        self._trained = self._trained or train
        began = time.perf_counter()
        found = next((values for asked in self._ahead if (values := self._of(asked, ids)) is not None), None)
        if found is None:
            self.waits += 1
            asked = self._ask(ids, self.steps)
            found = self._library.scene.agreement.wait(lambda: self._take(asked), f"the rows of {self.name}")
        self.seconds += time.perf_counter() - began
        return found

    def prefetch(self, ids: Tensor) -> None:
        """Ask for rows of the next batch, as they will be after the step under way (after the last, if none is)."""
        self._ahead.append(self._ask(ids, self.steps + self._trained))

    def _of(self, asked: Asked, ids: Tensor) -> Tensor | None:
        """These rows, if all of them were asked for and are of this step."""
        if asked.step != self.steps or not len(asked.ids):
            return None
        same = torch.equal(asked.ids, ids)
        places = torch.searchsorted(asked.ids, ids).clamp_(max=len(asked.ids) - 1)
        if not same and not torch.equal(asked.ids[places], ids):
            return None
        self._ahead = [other for other in self._ahead if other is not asked]
        values = self._library.scene.agreement.wait(lambda: self._take(asked), f"the rows of {self.name}")
        return values if same else values[places]

    def _ask(self, ids: Tensor, step: int) -> Asked:
        body = {"table": self._number, "step": step}
        parts = [(server, where, self._library.send(server, "rows.pull", body, [ids[where]])) for server, where in self._library.split(ids)]
        return Asked(step, ids, parts)

    def _take(self, asked: Asked) -> Tensor:
        try:
            answers = [(where, self._library.wait(server, message).tensors[0]) for server, where, message in asked.parts]
        except DeadlineExceeded as error:
            raise self._named(error, asked.parts[0][0]) from error
        if len(answers) == 1:
            return answers[0][1]  # type: ignore[no-any-return]
        values = torch.empty(len(asked.ids), self.spec.dim, dtype=self.spec.kind)
        for where, part in answers:
            values[where] = part
        return values

    def _named(self, error: DeadlineExceeded, server: int) -> DeadlineExceeded:
        """The error with the names of those who are waited for."""
        given = self._library.call(server, "rows.given", {"table": self._number}).body["workers"]
        missing = tuple(rank for rank in range(self._library.scene.group.size) if rank not in given)
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return DeadlineExceeded(f"{error}: the rows of {self.name} wait for step {self.steps} of {ranks}", missing)

    # ---- steps

    def entry(self, gradient: Gradient, settings: dict[str, Any]) -> dict[str, Any]:
        """What is told of the next step, beside the gradient."""
        changed = settings != self._told
        self._told = settings
        return {"table": self._number, "step": self.steps + 1, "used": gradient.used, "settings": settings if changed else None}

    def advance(self) -> None:
        """The next step has been given."""
        self.steps += 1
        self._trained = False
        old = [asked for asked in self._ahead if asked.step < self.steps]
        self._ahead = [asked for asked in self._ahead if asked.step >= self.steps]
        for asked in old:  # nobody wants it any more, and it would be kept
            self._take(asked)

    # ---- state: everything here is done by one worker for all

    def facts(self) -> dict[str, Any]:
        """A digest of the rows in use, how many they are, and how many steps there were, over all servers."""
        body = {"table": self._number, "step": self.steps}
        found = [self._library.call(server, "rows.digest", body).body for server in range(self._library.servers)]
        digest = sum(int(answer["digest"], 16) for answer in found) % (1 << 64)
        return {"digest": f"{digest:016x}", "rows": sum(answer["rows"] for answer in found), "count": found[0]["count"]}

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """All rows in use and what is remembered of them, some at a time."""
        each = max(1, PART_BYTES // (self.spec.dim * self.spec.kind.itemsize))
        for server in range(self._library.servers):
            start = 0
            while True:
                body = {"table": self._number, "step": self.steps, "start": start, "stop": start + each}
                answer = self._library.call(server, "rows.part", body)
                if not len(answer.tensors[0]):
                    break
                yield dict(zip(answer.body["names"], answer.tensors, strict=True))
                start += each

    def clear(self, seed: int, count: int) -> None:
        """Nothing is in use any more; so many steps have been taken."""
        for server in range(self._library.servers):
            self._library.call(server, "rows.clear", {"table": self._number, "step": self.steps, "seed": seed, "count": count})

    def put(self, part: dict[str, Tensor]) -> None:
        """Take up what `parts` gave."""
        for server, where in self._library.split(part["ids"]):
            tensors = [values[where] for values in part.values()]
            self._library.call(server, "rows.put", {"table": self._number, "names": list(part)}, tensors)

    def forget(self, seed: int) -> None:
        """What was asked for ahead is void: the table has become another, whose rows begin by this seed. On all workers."""
        self.spec = replace(self.spec, seed=seed)
        old, self._ahead = self._ahead, []
        for asked in old:
            if asked.step <= self.steps:  # the others are answered after a step that may never come
                self._take(asked)


def merged(found: Sequence[tuple[Tensor, Tensor]], dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Several gradients of some rows each, as one."""
    if not found:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dim, dtype=dtype)
    return rows.summed(found, dim, dtype)
