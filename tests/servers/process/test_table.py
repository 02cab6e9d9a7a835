"""A server's part of a table: rows are made when they are first stepped, found again, and the
same however they are dealt.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import Mismatch, UsageError
from paceline.servers.process import table
from paceline.servers.process.table import DirectIndex, HashedIndex, TableShard, TableSpec

SPEC = TableSpec(rows=10_000, dim=4, dtype="float64", seed=3, std=1.0, rule="Adagrad")
SETTINGS = {"lr": 0.1, "lr_decay": 0.0, "eps": 1e-10, "initial_accumulator_value": 0.0}


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def grad(found: Tensor) -> Tensor:
    return (found[:, None] * torch.tensor([1.0, -2.0, 0.5, 3.0])).double().cos()


def stepped(servers: int, spec: TableSpec = SPEC, steps: int = 5) -> list[TableShard]:
    made = [TableShard(spec, SETTINGS, server=server, servers=servers) for server in range(servers)]
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        drawn = torch.randint(spec.rows, (3000,), generator=generator).unique()
        for server, each in enumerate(made):
            mine = drawn[drawn % servers == server]
            each.take_step([(mine, grad(mine))])
    return made


def values(made: list[TableShard], found: Tensor) -> Tensor:
    whole = torch.empty(len(found), made[0].spec.dim, dtype=made[0].spec.torch_dtype)
    for server, each in enumerate(made):
        here = found % len(made) == server
        whole[here] = each.read_rows(found[here])
    return whole


@pytest.mark.parametrize("index", [lambda: DirectIndex(1 << 20), HashedIndex])
def test_an_index_finds_what_was_added(index: Any) -> None:
    made, chance, known = index(), np.random.default_rng(1), dict[int, int]()
    for _ in range(8):
        drawn = np.unique(chance.integers(0, 1 << 20, 20_000))
        found = made.find_slots(drawn)
        assert found.tolist() == [known.get(number, -1) for number in drawn.tolist()]
        new = drawn[found < 0]
        made.add_rows(new, len(known))
        known |= {number: len(known) + place for place, number in enumerate(new.tolist())}
    assert made.find_slots(np.array([], dtype=np.int64)).tolist() == []


def test_rows_that_were_never_stepped_take_nothing() -> None:
    made = TableShard(SPEC, SETTINGS, server=0, servers=1)
    assert (
        torch.equal(made.read_rows(ids(5, 9)), SPEC.make_initial_rows(ids(5, 9))) and len(made) == 0
    )
    made.take_step([(ids(5), grad(ids(5)))])
    assert len(made) == 1 and torch.equal(made.read_rows(ids(9)), SPEC.make_initial_rows(ids(9)))
    assert not torch.equal(made.read_rows(ids(5)), SPEC.make_initial_rows(ids(5)))


def test_any_number_of_servers_gives_the_same() -> None:
    everything, one = torch.arange(SPEC.rows), stepped(1)
    for servers in (2, 3):
        found = stepped(servers)
        assert torch.equal(values(found, everything), values(one, everything))
        assert (
            sum(each.compute_fingerprint() for each in found) % (1 << 64)
            == one[0].compute_fingerprint()
        )
    assert stepped(1, steps=4)[0].compute_fingerprint() != one[0].compute_fingerprint()


def test_a_hashed_table_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a billion rows, of which few are in use."""
    one = stepped(2)
    monkeypatch.setattr(table, "MAX_DIRECT_ROWS", 0)
    assert torch.equal(
        values(stepped(2), torch.arange(SPEC.rows)), values(one, torch.arange(SPEC.rows))
    )
    large = TableShard(
        TableSpec(10**15, 4, "float64", 3, 1.0, "Adagrad"), SETTINGS, server=1, servers=3
    )
    far = ids(10**14, 10**15 - 3) // 3 * 3 + 1
    large.take_step([(far, grad(far))])
    assert len(large) == 2 and not torch.equal(
        large.read_rows(far), large.spec.make_initial_rows(far)
    )


def test_what_comes_by_itself_is_applied_by_itself() -> None:
    one, other = (TableShard(SPEC, SETTINGS, server=0, servers=1) for _ in range(2))
    for found in (ids(1, 4), ids(4, 6)):
        one.take_step([(found, grad(found))])
        other.take_step([(found, grad(found))])
    assert (
        torch.equal(one.read_rows(ids(1, 4, 6)), other.read_rows(ids(1, 4, 6)))
        and one.step_count == 2
    )


def test_settings_hold_from_the_step_they_come_with() -> None:
    made = TableShard(TableSpec(10, 4, "float64", 3, 1.0, "SGD"), {"lr": 0.1}, server=0, servers=1)
    before = made.read_rows(ids(2))
    made.take_step([(ids(2), torch.ones(1, 4).double())], {"lr": 1.0})
    made.take_step([(ids(2), torch.ones(1, 4).double())])
    assert torch.allclose(made.read_rows(ids(2)), before - 2)


@pytest.mark.parametrize("direct", [True, False])
def test_a_step_goes_back(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had never been: values, what is remembered, the settings, the count, and which
    rows are in use.
    """
    monkeypatch.setattr(table, "MAX_DIRECT_ROWS", table.MAX_DIRECT_ROWS if direct else 0)
    made, twin = stepped(1)[0], stepped(1)[0]
    drawn = torch.arange(0, 9_000, 3)
    befores = [
        made.take_step([(found, grad(found))], SETTINGS | {"lr": lr}, undo=True)
        for found, lr in ((drawn, 0.5), (drawn + 1, 0.7))
    ]
    befores.append(made.change_settings(SETTINGS | {"lr": 0.9}))
    assert made.compute_fingerprint() != twin.compute_fingerprint() and made.settings["lr"] == 0.9
    for before in reversed(befores):
        made.undo_step(before)
    assert (made.used_slots, made.step_count, made.settings, made.compute_fingerprint()) == (
        twin.used_slots,
        twin.step_count,
        twin.settings,
        twin.compute_fingerprint(),
    )
    for each in (made, twin):
        each.take_step([(drawn + 1, grad(drawn))])
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            made.get_part(0, made.used_slots).values(),
            twin.get_part(0, twin.used_slots).values(),
            strict=True,
        )
    )


def test_parts_are_put_into_others() -> None:
    """What is remembered, too: the next step is the same."""
    one, found = (
        stepped(2),
        [TableShard(SPEC, SETTINGS, server=server, servers=3) for server in range(3)],
    )
    for each in found:
        each.reset_rows(SPEC.seed, one[0].step_count)
        for source in one:
            for start in range(0, len(source), 700):
                each.load_part(source.get_part(start, start + 700))
    assert sum(map(len, found)) == sum(map(len, one))
    for made in (one, found):
        for server, each in enumerate(made):
            more = torch.arange(0, 600)[torch.arange(0, 600) % len(made) == server]
            each.take_step([(more, grad(more))])
    assert torch.equal(values(found, torch.arange(SPEC.rows)), values(one, torch.arange(SPEC.rows)))


class TestRefusals:
    made = TableShard(SPEC, SETTINGS, server=0, servers=2)

    @pytest.mark.parametrize(
        "found", [ids(1), ids(-2), ids(10_000), torch.tensor([2.0]), ids(2)[None]]
    )
    def test_of_rows(self, found: Tensor) -> None:
        with pytest.raises(Mismatch, match="rows"):
            self.made.read_rows(found)

    @pytest.mark.parametrize(
        "found", [(ids(2, 2), 2, 4), (ids(4, 2), 2, 4), (ids(2), 2, 4), (ids(2), 1, 3)]
    )
    def test_of_gradients(self, found: Any) -> None:
        rows, *shape = found
        with pytest.raises(Mismatch, match="gradient"):
            self.made.take_step([(rows, torch.zeros(shape).double())])

    def test_of_tables(self) -> None:
        with pytest.raises(UsageError, match="this is no table"):
            TableShard(TableSpec(10, 4, "float16", 3, 1.0, "SGD"), {"lr": 0.1}, server=0, servers=1)
        with pytest.raises(UsageError, match="this is no table"):
            TableShard(SPEC, SETTINGS, server=2, servers=2)
