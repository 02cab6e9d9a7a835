"""One server's shard of a sparse table: the rows that were stepped, their optimizer state, and the
index of where each lies.

    row (number in the table)   ->  index  ->  slot     values, memories: tensors of slots, made
                                                        twice as long when they are full
    a row that never had a gradient has no slot: a read gives the value that it begins with

Rows are dealt by their numbers: row r lies on server r % servers, as number r // servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.cluster.machine import memory
from paceline.comm.wire_format import DTYPES
from paceline.errors import Mismatch, UsageError
from paceline.servers.process import row_optimizers
from paceline.servers.process.row_optimizers import Settings

# rows of a server for which a place each is cheap: 4 bytes, taken from the system when they are
# first used
DIRECT: Final = 1 << 26
FIRST: Final = 1 << 10  # slots to begin with


@dataclass(frozen=True)
class TableSpec:
    """The definition of a table, the same on all workers."""

    rows: int
    dim: int
    dtype: str  # without "torch."
    seed: int
    std: float
    rule: str  # a key of `row_optimizers.RULES`

    @property
    def sound(self) -> bool:
        """Whether such a table can exist."""
        whole = all(type(number) is int for number in (self.rows, self.dim, self.seed)) and type(
            self.std
        ) in (int, float)
        return (
            whole
            and 0 < self.rows < 1 << 62
            and 0 < self.dim < 1 << 40
            and self.dtype in ("float32", "float64")
        )

    @property
    def kind(self) -> torch.dtype:
        """The dtype as torch has it."""
        return DTYPES[self.dtype]

    def plain(self) -> dict[str, Any]:
        """Write as plain data, for a message."""
        return asdict(self)

    def initial(self, ids: Tensor) -> Tensor:
        """Return the initial values of these rows."""
        return row_optimizers.initial(ids, self.dim, self.kind, seed=self.seed, std=self.std)


class RowIndex(Protocol):
    """Maps row numbers to slots, which are dealt in order, from 0 on."""

    def find(self, ids: Any) -> Any:
        """Find the slots of these (int64, each once); -1 for one that has none."""
        ...

    def add(self, ids: Any, first: int) -> None:
        """Give these, which have none, the slots `first`, `first` + 1, ..."""
        ...


class DirectIndex:
    """An index with a place for each number that there could be.

    Unused places take no memory: the system gives it when it is written.
    """

    def __init__(self, count: int) -> None:
        self._slots = np.zeros(count, dtype=np.int32)

    def find(self, ids: Any) -> Any:
        return self._slots[ids].astype(np.int64) - 1

    def add(self, ids: Any, first: int) -> None:
        self._slots[ids] = np.arange(first + 1, first + 1 + len(ids))


class HashedIndex:
    """An index with open addressing and linear probing, all numbers of a call at once; at most
    half full.
    """

    def __init__(self) -> None:
        self._keys = np.full(2 * FIRST, -1, dtype=np.int64)
        self._slots = np.zeros(2 * FIRST, dtype=np.int64)
        self._used = 0

    def find(self, ids: Any) -> Any:
        found = np.full(len(ids), -1, dtype=np.int64)
        open_, places = np.arange(len(ids)), self._begin(ids)
        while len(open_):
            keys = self._keys[places]
            hit = keys == ids[open_]
            found[open_[hit]] = self._slots[places[hit]]
            on = ~hit & (keys != -1)
            open_, places = open_[on], (places[on] + 1) & (len(self._keys) - 1)
        return found

    def add(self, ids: Any, first: int) -> None:
        while 2 * (self._used + len(ids)) > len(self._keys):
            kept = self._keys != -1
            keys, slots = self._keys[kept], self._slots[kept]
            self._keys, self._slots = (
                np.full(2 * len(self._keys), -1, dtype=np.int64),
                np.zeros(2 * len(self._keys), dtype=np.int64),
            )
            self._put(keys, slots)
        self._put(ids, np.arange(first, first + len(ids)))
        self._used += len(ids)

    def _put(self, ids: Any, slots: Any) -> None:
        places = self._begin(ids)
        while len(ids):
            free = self._keys[places] == -1
            self._keys[places[free]] = ids[free]  # where two want one place, the last has it
            won = self._keys[places] == ids
            self._slots[places[won]] = slots[won]
            ids, slots, places = ids[~won], slots[~won], (places[~won] + 1) & (len(self._keys) - 1)

    def _begin(self, ids: Any) -> Any:
        return (row_optimizers.mix(ids.astype(np.uint64)) & np.uint64(len(self._keys) - 1)).astype(
            np.int64
        )


class RowsBefore(NamedTuple):
    """The rows that a step has changed, as they were before."""

    steps: int  # as optimizers count them
    settings: dict[str, Any]
    used: int  # slots
    slots: Tensor  # that were in use
    kept: list[Tensor]


class TableShard:
    """One server's rows: those with numbers r, r + `servers`, r + 2 * `servers`, ..., where r is
    the number of this server.

    Ids that come and go are those of the whole table. `count` is how many steps there were, as
    optimizers count them.
    """

    def __init__(self, spec: TableSpec, settings: Settings, *, server: int, servers: int) -> None:
        if not (spec.sound and type(server) is type(servers) is int and 0 <= server < servers):
            raise UsageError(f"this is no table: {spec}, on server {server} of {servers}")
        free = memory()
        if free is not None and 3 * FIRST * spec.dim * spec.kind.itemsize > free:
            raise UsageError(
                f"rows of {spec.dim} numbers are too long for a "
                f"server with {free:,} bytes of memory left"
            )
        self.spec, self.settings = spec, dict(settings)
        self.count = 0
        self._rule = row_optimizers.check(spec.rule, settings)
        self._server, self._servers = server, servers
        self._empty()

    def _empty(self) -> None:
        self._index = self._indexed(0)
        self._ids = torch.empty(FIRST, dtype=torch.int64)  # by slot
        self._kept = [
            torch.empty(FIRST, self.spec.dim, dtype=self.spec.kind)
            for _ in range(1 + len(self._rule.remembers))
        ]
        self.used = 0  # slots

    def _indexed(self, used: int) -> RowIndex:
        """Make an index of so many rows, in the order of their first use."""
        mine = len(range(self._server, self.spec.rows, self._servers))
        found: RowIndex = DirectIndex(mine) if mine <= DIRECT else HashedIndex()
        if used:
            found.add(self._ids[:used].numpy() // self._servers, 0)
        return found

    def __len__(self) -> int:
        return self.used

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use, with their optimizer state."""
        return self.used * (
            self._ids.itemsize + sum(kept.shape[1] * kept.itemsize for kept in self._kept)
        )

    # ---- rows

    def read(self, ids: Tensor) -> Tensor:
        """Return the values of these rows as they are now; no row is made."""
        slots = torch.from_numpy(self._index.find(self._mine(ids)))
        if not self.used:
            return self.spec.initial(ids)
        values = self._kept[0].index_select(0, slots.clamp(min=0))
        new = (slots < 0).nonzero()[:, 0]
        if len(new):
            values[new] = self.spec.initial(ids[new])
        return values

    def step(
        self,
        pushed: Sequence[tuple[Tensor, Tensor]],
        settings: Settings | None = None,
        *,
        undo: bool = False,
        factor: float = 1.0,
        part: float = 1.0,
    ) -> RowsBefore:
        """Step with the sum of the `pushed`, each some rows (every id once) and their gradients;
        the sum is in their order.

        The sum is multiplied by `factor`, the learning rate by `part`. Returns what `back` takes,
        with `undo`; without it that has no rows.
        """
        before = self.change(settings)
        for ids, grad in pushed:
            if (ids[1:] <= ids[:-1]).any():
                raise Mismatch("the rows of a gradient come in order, each once")
            if grad.dtype != self.spec.kind or grad.shape != (len(ids), self.spec.dim):
                raise Mismatch(
                    f"a gradient of {len(ids)} rows is {self.spec.dtype} [{len(ids)}, "
                    f"{self.spec.dim}], and not {_form(grad)}"
                )
        ids, grad = row_optimizers.summed(pushed, self.spec.dim, self.spec.kind)
        self.count += 1
        slots = self._slots(ids)
        if undo:
            old = slots[slots < before.used]
            before = before._replace(
                slots=old, kept=[kept.index_select(0, old) for kept in self._kept]
            )
        found = [kept.index_select(0, slots) for kept in self._kept]
        how = self.settings if part == 1.0 else {**self.settings, "lr": self.settings["lr"] * part}
        self._rule.step(found, grad if factor == 1.0 else grad * factor, how, self.count)
        for kept, values in zip(self._kept, found, strict=True):
            kept.index_copy_(0, slots, values)
        return before

    def change(self, settings: Settings | None) -> RowsBefore:
        """Step without a gradient: other settings count from now on, if there are any.

        Returns what `back` takes.
        """
        nothing = [kept.new_empty(0, self.spec.dim) for kept in self._kept]
        before = RowsBefore(
            self.count, self.settings, self.used, torch.empty(0, dtype=torch.int64), nothing
        )
        if settings:
            row_optimizers.check(self.spec.rule, settings)
            self.settings = dict(settings)
        return before

    def back(self, before: RowsBefore) -> None:
        """Undo the last step."""
        self.count, self.settings = before.steps, before.settings
        for kept, values in zip(self._kept, before.kept, strict=True):
            kept.index_copy_(0, before.slots, values)
        if self.used > before.used:
            self._index, self.used = self._indexed(before.used), before.used

    def _mine(self, ids: Tensor) -> Any:
        """Return the numbers of these rows on this server."""
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise Mismatch(f"rows are named by one int64 each, and not by {_form(ids)}")
        found = ids.numpy()
        if len(found) and (
            found.min() < 0
            or found.max() >= self.spec.rows
            or (found % self._servers != self._server).any()
        ):
            raise Mismatch(
                f"some rows don't lie here: row r of {self.spec.rows} does where r % "
                f"{self._servers} is {self._server}"
            )
        return found // self._servers

    def _slots(self, ids: Tensor) -> Tensor:
        """Return the slots of these rows; new ones are made."""
        mine = self._mine(ids)
        slots = self._index.find(mine)
        new = np.flatnonzero(slots < 0)
        if len(new):
            first, fresh = self.used, ids[torch.from_numpy(new)]
            self._make_room(first + len(new))
            self._index.add(mine[new], first)
            slots[new] = np.arange(first, first + len(new))
            place = slice(first, first + len(new))
            self._ids[place], self._kept[0][place] = fresh, self.spec.initial(fresh)
            for memory in self._kept[1:]:
                memory[place] = self._rule.first(self.settings)
            self.used = first + len(new)
        return torch.from_numpy(slots)

    def _make_room(self, wanted: int) -> None:
        size = len(self._ids)
        while size < wanted:
            size *= 2
        if size > len(self._ids):
            self._ids = _longer(self._ids, size, self.used)
            self._kept = [_longer(kept, size, self.used) for kept in self._kept]

    # ---- state

    def part(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return rows `start` to `stop` of those in use, in the order of their first use, with
        their optimizer state.
        """
        names = ("values", *self._rule.remembers)
        return {"ids": self._ids[start : min(stop, self.used)]} | {
            name: kept[start : min(stop, self.used)]
            for name, kept in zip(names, self._kept, strict=True)
        }

    def put(self, part: Mapping[str, Tensor]) -> None:
        """Load rows that `part` gave, perhaps on another server; those in it that lie elsewhere
        are left out.
        """
        here = part["ids"] % self._servers == self._server
        slots = self._slots(part["ids"][here])
        for name, kept in zip(("values", *self._rule.remembers), self._kept, strict=True):
            kept.index_copy_(0, slots, part[name][here])

    def forget(self, seed: int, count: int) -> None:
        """Reset as if no row had been used; the initial values are those of this seed."""
        self.spec, self.count = replace(self.spec, seed=seed), count
        self._empty()

    def fingerprint(self) -> int:
        """Compute a sum over the rows in use, modulo 2 ** 64: the same in any order of making,
        and however rows are dealt to servers.
        """
        total = 0
        for start in range(0, self.used, row_optimizers.AT_ONCE):
            part = self.part(start, start + row_optimizers.AT_ONCE)
            words = part["values"].contiguous().view(torch.int32).numpy().astype(np.uint64)
            state = row_optimizers.mix(part["ids"].numpy().astype(np.uint64))
            for column in words.T:
                state = row_optimizers.mix(state ^ column)
            total += int(state.sum(dtype=np.uint64))
        return total % (1 << 64)


def _longer(kept: Tensor, size: int, used: int) -> Tensor:
    found = torch.empty(size, *kept.shape[1:], dtype=kept.dtype)
    found[:used] = kept[:used]
    return found


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
