"""One server's shard of a sparse table: rows, their optimizer state, and an index of their slots.

    row number on this server   ->  index  ->  slot     values and states: tensors with an entry for
                                                        each slot, doubled when they are full
    A row that never had a gradient has no slot: a read computes its initial value.

Rows are dealt by their numbers: row r lies on server r % servers, as number r // servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.cluster.machine import read_memory
from paceline.comm.wire_format import DTYPES
from paceline.errors import Mismatch, UsageError
from paceline.servers.process import row_optimizers
from paceline.servers.process.row_optimizers import Settings

# Largest number of rows of a server for which a `DirectIndex` is cheap: it takes 4 bytes for each,
# which the system provides when they are first used.
MAX_DIRECT_ROWS: Final = 1 << 26
# Number of slots of an empty table.
INITIAL_SLOTS: Final = 1 << 10


@dataclass(frozen=True)
class TableSpec:
    """The definition of a table, the same on all workers."""

    rows: int
    dim: int
    dtype: str  # without "torch."
    seed: int
    std: float
    rule: str  # a key of `row_optimizers.ROW_RULES`

    @property
    def is_valid(self) -> bool:
        """Whether such a table can exist."""
        are_numbers = all(
            type(number) is int for number in (self.rows, self.dim, self.seed)
        ) and type(self.std) in (int, float)
        return (
            are_numbers
            and 0 < self.rows < 1 << 62
            and 0 < self.dim < 1 << 40
            and self.dtype in ("float32", "float64")
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a torch object."""
        return DTYPES[self.dtype]

    def to_plain_data(self) -> dict[str, Any]:
        """Convert to plain data for a message."""
        return asdict(self)

    def make_initial_rows(self, ids: Tensor) -> Tensor:
        """Make the initial values of these rows."""
        return row_optimizers.make_initial_values(
            ids, self.dim, self.torch_dtype, seed=self.seed, std=self.std
        )


class RowIndex(Protocol):
    """Maps the numbers of rows on this server to slots, counted from 0 in order of first use."""

    def find_slots(self, ids: Any) -> Any:
        """Find the slot of each row (int64, each row once); -1 for a row without a slot."""
        ...

    def add_rows(self, ids: Any, first: int) -> None:
        """Give rows that have no slot yet the slots `first`, `first` + 1, ..."""
        ...


class DirectIndex:
    """An index with a place for each row that the server could have.

    A place has the slot + 1, so that 0 means no slot. Unused places take no memory: the system
    provides the pages of zeros when they are first written.
    """

    def __init__(self, count: int) -> None:
        self._slots = np.zeros(count, dtype=np.int32)

    def find_slots(self, ids: Any) -> Any:
        return self._slots[ids].astype(np.int64) - 1

    def add_rows(self, ids: Any, first: int) -> None:
        self._slots[ids] = np.arange(first + 1, first + 1 + len(ids))


class HashedIndex:
    """A hash table with open addressing and linear probing, at most half full.

    Each loop handles all rows of a call at once: one turn looks at one place for each row.
    """

    def __init__(self) -> None:
        self._keys = np.full(2 * INITIAL_SLOTS, -1, dtype=np.int64)
        self._slots = np.zeros(2 * INITIAL_SLOTS, dtype=np.int64)
        self._rows_stored = 0

    def find_slots(self, ids: Any) -> Any:
        slots = np.full(len(ids), -1, dtype=np.int64)
        unresolved, places = np.arange(len(ids)), self._hash_to_places(ids)
        while len(unresolved):
            keys = self._keys[places]
            is_hit = keys == ids[unresolved]
            slots[unresolved[is_hit]] = self._slots[places[is_hit]]
            goes_on = ~is_hit & (keys != -1)
            # An empty place ends the search of a row; another row's place leads on to the next.
            unresolved, places = unresolved[goes_on], (places[goes_on] + 1) & (len(self._keys) - 1)
        return slots

    def add_rows(self, ids: Any, first: int) -> None:
        # Double the table until it has room. All entries get new places.
        while 2 * (self._rows_stored + len(ids)) > len(self._keys):
            in_use = self._keys != -1
            keys, slots = self._keys[in_use], self._slots[in_use]
            self._keys, self._slots = (
                np.full(2 * len(self._keys), -1, dtype=np.int64),
                np.zeros(2 * len(self._keys), dtype=np.int64),
            )
            self._store_slots(keys, slots)
        self._store_slots(ids, np.arange(first, first + len(ids)))
        self._rows_stored += len(ids)

    def _store_slots(self, ids: Any, slots: Any) -> None:
        places = self._hash_to_places(ids)
        while len(ids):
            free = self._keys[places] == -1
            # If several rows write to one free place, the last write wins. The read below shows
            # which row that was, and the others go on to the next place.
            self._keys[places[free]] = ids[free]
            won = self._keys[places] == ids
            self._slots[places[won]] = slots[won]
            ids, slots, places = ids[~won], slots[~won], (places[~won] + 1) & (len(self._keys) - 1)

    def _hash_to_places(self, ids: Any) -> Any:
        return (
            row_optimizers.mix_bits(ids.astype(np.uint64)) & np.uint64(len(self._keys) - 1)
        ).astype(np.int64)


class RowUndo(NamedTuple):
    """What is needed to undo a step: the changed rows as they were before, and the counts."""

    step_count: int  # number of steps, as the optimizer counts them
    settings: dict[str, Any]
    used_slots: int  # number of slots in use
    changed_slots: Tensor  # the changed slots that were in use
    row_tensors: list[Tensor]  # values and optimizer state in these slots


class TableShard:
    """One server's rows of a table: numbers r, r + `servers`, r + 2 * `servers`, ... for server r.

    Row ids in arguments and results are numbers in the whole table. Invariants:

    - Slots 0 ... `used_slots` - 1 are in use. `_ids_by_slot` and each of `_row_tensors` (values,
      then the optimizer's states) have an entry for each of them, and room for more.
    - The index has exactly the rows in `_ids_by_slot`, and maps each to its slot.
    - `step_count` is the number of steps with a gradient, as the optimizer counts them.
    """

    def __init__(self, spec: TableSpec, settings: Settings, *, server: int, servers: int) -> None:
        if not (spec.is_valid and type(server) is type(servers) is int and 0 <= server < servers):
            raise UsageError(f"this is no table: {spec}, on server {server} of {servers}")
        # Values, a copy while they grow, and gradients: refuse a table that has no room for them.
        free = read_memory()
        if free is not None and 3 * INITIAL_SLOTS * spec.dim * spec.torch_dtype.itemsize > free:
            raise UsageError(
                f"rows of {spec.dim} numbers are too long for a "
                f"server with {free:,} bytes of memory left"
            )
        self.spec, self.settings = spec, dict(settings)
        self.step_count = 0
        self._rule = row_optimizers.find_rule(spec.rule, settings)
        self._server, self._servers = server, servers
        self._remove_all_rows()

    def _remove_all_rows(self) -> None:
        self._index = self._build_index(0)
        self._ids_by_slot = torch.empty(INITIAL_SLOTS, dtype=torch.int64)
        self._row_tensors = [
            torch.empty(INITIAL_SLOTS, self.spec.dim, dtype=self.spec.torch_dtype)
            for _ in range(1 + len(self._rule.state_names))
        ]
        self.used_slots = 0

    def _build_index(self, used: int) -> RowIndex:
        """Build an index of the first `used` slots."""
        row_count = len(range(self._server, self.spec.rows, self._servers))
        index: RowIndex = DirectIndex(row_count) if row_count <= MAX_DIRECT_ROWS else HashedIndex()
        if used:
            index.add_rows(self._ids_by_slot[:used].numpy() // self._servers, 0)
        return index

    def __len__(self) -> int:
        return self.used_slots

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use, with their optimizer state."""
        return self.used_slots * (
            self._ids_by_slot.itemsize
            + sum(tensor.shape[1] * tensor.itemsize for tensor in self._row_tensors)
        )

    # ---- rows

    def read_rows(self, ids: Tensor) -> Tensor:
        """Read the current values of some rows. Rows without a slot don't get one."""
        slots = torch.from_numpy(self._index.find_slots(self._compute_local_rows(ids)))
        if not self.used_slots:
            return self.spec.make_initial_rows(ids)
        values = self._row_tensors[0].index_select(0, slots.clamp(min=0))
        absent = (slots < 0).nonzero()[:, 0]
        if len(absent):
            values[absent] = self.spec.make_initial_rows(ids[absent])
        return values

    def take_step(
        self,
        pushed: Sequence[tuple[Tensor, Tensor]],
        settings: Settings | None = None,
        *,
        undo: bool = False,
        factor: float = 1.0,
        part: float = 1.0,
    ) -> RowUndo:
        """Take a step with the sum of some gradients, added in their order.

        Args:
            pushed: Rows and gradient of each worker. Rows are in rising order, each once.
            settings: The optimizer's settings from now on. Default: no change.
            undo: Keep the rows as they were, so that `undo_step` can undo the step.
            factor: Factor of the sum.
            part: Factor of the learning rate, in this step alone.

        Returns:
            The argument of `undo_step`. Without `undo` it has no rows.

        Raises:
            Mismatch: If a gradient doesn't fit the table.
        """
        before = self.change_settings(settings)
        for ids, grad in pushed:
            if (ids[1:] <= ids[:-1]).any():
                raise Mismatch("the rows of a gradient come in order, each once")
            if grad.dtype != self.spec.torch_dtype or grad.shape != (len(ids), self.spec.dim):
                raise Mismatch(
                    f"a gradient of {len(ids)} rows is {self.spec.dtype} [{len(ids)}, "
                    f"{self.spec.dim}], and not {_describe_tensor(grad)}"
                )
        ids, grad = row_optimizers.sum_row_gradients(pushed, self.spec.dim, self.spec.torch_dtype)
        self.step_count += 1
        slots = self._allot_slots(ids)
        # Rows that get their first slot in this step need no copy: undoing removes the slot.
        if undo:
            changed_slots = slots[slots < before.used_slots]
            before = before._replace(
                changed_slots=changed_slots,
                row_tensors=[tensor.index_select(0, changed_slots) for tensor in self._row_tensors],
            )
        rows = [tensor.index_select(0, slots) for tensor in self._row_tensors]
        step_settings = (
            self.settings if part == 1.0 else {**self.settings, "lr": self.settings["lr"] * part}
        )
        self._rule.step(
            rows, grad if factor == 1.0 else grad * factor, step_settings, self.step_count
        )
        for tensor, values in zip(self._row_tensors, rows, strict=True):
            tensor.index_copy_(0, slots, values)
        return before

    def change_settings(self, settings: Settings | None) -> RowUndo:
        """Take a step without a gradient: change the settings, if there are any.

        Returns the argument of `undo_step`.
        """
        no_rows = [tensor.new_empty(0, self.spec.dim) for tensor in self._row_tensors]
        before = RowUndo(
            self.step_count,
            self.settings,
            self.used_slots,
            torch.empty(0, dtype=torch.int64),
            no_rows,
        )
        if settings:
            row_optimizers.find_rule(self.spec.rule, settings)
            self.settings = dict(settings)
        return before

    def undo_step(self, before: RowUndo) -> None:
        """Undo the last step, from the result of `take_step` or `change_settings`."""
        self.step_count, self.settings = before.step_count, before.settings
        for tensor, values in zip(self._row_tensors, before.row_tensors, strict=True):
            tensor.index_copy_(0, before.changed_slots, values)
        # Rows that were new in the step lie in the last slots. An index can't remove rows, so it is
        # built again.
        if self.used_slots > before.used_slots:
            self._index, self.used_slots = self._build_index(before.used_slots), before.used_slots

    def _compute_local_rows(self, ids: Tensor) -> Any:
        """Compute the numbers of some rows on this server. Raises `Mismatch` for foreign rows."""
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise Mismatch(f"rows are named by one int64 each, and not by {_describe_tensor(ids)}")
        numbers = ids.numpy()
        if len(numbers) and (
            numbers.min() < 0
            or numbers.max() >= self.spec.rows
            or (numbers % self._servers != self._server).any()
        ):
            raise Mismatch(
                f"some rows don't lie on this server: it has each row r of {self.spec.rows} with "
                f"r % {self._servers} == {self._server}"
            )
        return numbers // self._servers

    def _allot_slots(self, ids: Tensor) -> Tensor:
        """Get the slots of some rows, giving a slot and initial values to rows without one."""
        numbers = self._compute_local_rows(ids)
        slots = self._index.find_slots(numbers)
        absent = np.flatnonzero(slots < 0)
        if len(absent):
            first, new_ids = self.used_slots, ids[torch.from_numpy(absent)]
            self._make_room(first + len(absent))
            self._index.add_rows(numbers[absent], first)
            slots[absent] = np.arange(first, first + len(absent))
            new_slots = slice(first, first + len(absent))
            self._ids_by_slot[new_slots], self._row_tensors[0][new_slots] = (
                new_ids,
                self.spec.make_initial_rows(new_ids),
            )
            for state in self._row_tensors[1:]:
                state[new_slots] = self._rule.make_initial_state(self.settings)
            self.used_slots = first + len(absent)
        return torch.from_numpy(slots)

    def _make_room(self, slots: int) -> None:
        size = len(self._ids_by_slot)
        while size < slots:
            size *= 2
        if size > len(self._ids_by_slot):
            self._ids_by_slot = _lengthen_tensor(self._ids_by_slot, size, self.used_slots)
            self._row_tensors = [
                _lengthen_tensor(tensor, size, self.used_slots) for tensor in self._row_tensors
            ]

    # ---- state

    def get_part(self, start: int, stop: int) -> dict[str, Tensor]:
        """Get rows `start` to `stop` in the order of first use, with their optimizer state."""
        names = ("values", *self._rule.state_names)
        return {"ids": self._ids_by_slot[start : min(stop, self.used_slots)]} | {
            name: tensor[start : min(stop, self.used_slots)]
            for name, tensor in zip(names, self._row_tensors, strict=True)
        }

    def load_part(self, part: Mapping[str, Tensor]) -> None:
        """Load rows from `get_part`, perhaps of another server. Skips rows that lie elsewhere."""
        here = part["ids"] % self._servers == self._server
        slots = self._allot_slots(part["ids"][here])
        for name, tensor in zip(
            ("values", *self._rule.state_names), self._row_tensors, strict=True
        ):
            tensor.index_copy_(0, slots, part[name][here])

    def reset_rows(self, seed: int, count: int) -> None:
        """Reset the table as if no row had been used. Initial values follow from the seed."""
        self.spec, self.step_count = replace(self.spec, seed=seed), count
        self._remove_all_rows()

    def compute_fingerprint(self) -> int:
        """Compute a sum over the rows in use, modulo 2 ** 64.

        It depends neither on the order in which rows were first used nor on how many servers there
        are.
        """
        total = 0
        for start in range(0, self.used_slots, row_optimizers.ROWS_AT_A_TIME):
            part = self.get_part(start, start + row_optimizers.ROWS_AT_A_TIME)
            words = part["values"].contiguous().view(torch.int32).numpy().astype(np.uint64)
            state = row_optimizers.mix_bits(part["ids"].numpy().astype(np.uint64))
            # Mix the columns of all rows in turn, then add up the rows: addition has no order.
            for column in words.T:
                state = row_optimizers.mix_bits(state ^ column)
            total += int(state.sum(dtype=np.uint64))
        return total % (1 << 64)


def _lengthen_tensor(tensor: Tensor, size: int, used: int) -> Tensor:
    longer = torch.empty(size, *tensor.shape[1:], dtype=tensor.dtype)
    longer[:used] = tensor[:used]
    return longer


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
