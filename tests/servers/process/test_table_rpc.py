"""A server's tables in lockstep: what is answered, what waits, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.comm.rpc import RpcClient, RpcServer, derive_rpc_keys
from paceline.errors import Mismatch
from paceline.servers.process.main import Server
from paceline.servers.process.table import TableSpec
from paceline.servers.protocol import rows
from paceline.servers.protocol.message import Index, SentRequest, call_server, send_request
from tests.harness.jobs import PATIENCE as SECONDS

KEYS = derive_rpc_keys(b"0123456789abcdef", "tests")
SPEC = TableSpec(rows=100, dim=2, dtype="float64", seed=3, std=1.0, rule="SGD")
Callers = list[RpcClient]
Sent = SentRequest[Any]


@pytest.fixture
def callers() -> Iterator[Callers]:
    """Two workers of a server with a table."""
    receiver, over = RpcServer(KEYS, hosts=["127.0.0.1"], say=lambda text: None), threading.Event()
    thread = threading.Thread(
        target=lambda: (Server(receiver, over.is_set).run(), receiver.close())
    )
    thread.start()
    found = [
        RpcClient(receiver.addresses[0], KEYS, sender=rank, who="the server") for rank in range(2)
    ]
    for caller in found:
        table(caller)
    yield found
    over.set()
    thread.join()
    for caller in found:
        caller.close()


def table(caller: RpcClient, spec: TableSpec = SPEC, lr: float = 1.0) -> None:
    call_server(caller, rows.OpenTable(Index(0), spec.to_plain_data(), {"lr": lr}, 0, 1), SECONDS)


def gradient(
    step: int, *numbers: int, used: bool = True, settings: Any = None
) -> tuple[rows.RowGradient, ...]:
    """Ones for each of these rows."""
    ids, ones = torch.tensor(numbers, dtype=torch.int64), torch.ones(len(numbers), 2).double()
    return (rows.RowGradient(Index(0), step, used, settings, ids, ones),)


def give(
    caller: RpcClient, step: int, *numbers: int, used: bool = True, settings: Any = None
) -> Sent:
    return send_request(
        caller,
        rows.PushRows(
            gradient(step, *numbers, used=used, settings=settings), (0, 1), decided=False
        ),
        SECONDS,
    )


def pull(caller: RpcClient, step: int, *numbers: int) -> Sent:
    return send_request(caller, rows.PullRows(Index(0), step, "", torch.tensor(numbers)), SECONDS)


def wait(sent: Sent, seconds: float = SECONDS) -> Any:
    return sent.wait_for_reply(seconds)


def test_rows_are_read_once_all_have_given(callers: Callers) -> None:
    one, two = callers
    before = wait(pull(one, 0, 1, 2)).values
    asked = pull(one, 1, 1, 2)
    wait(give(one, 1, 1))
    with pytest.raises(TimeoutError):
        wait(asked, 0.3)
    wait(give(two, 1, 1, 2))
    assert torch.equal(wait(asked).values, before - torch.tensor([[2.0], [1.0]]))


def test_who_is_a_step_ahead_waits(callers: Callers) -> None:
    """It has used no rows, so it has waited for nobody."""
    one, two = callers
    wait(give(one, 1))
    ahead = give(one, 2, 5)
    with pytest.raises(TimeoutError):
        wait(ahead, 0.3)
    wait(give(two, 1))
    wait(ahead)
    wait(give(two, 2))
    assert torch.equal(wait(pull(two, 2, 5)).values, SPEC.make_initial_rows(torch.tensor([5])) - 1)


def test_a_step_that_nobody_used_counts_for_nobody(callers: Callers) -> None:
    one, two = callers
    for caller in callers:
        wait(give(caller, 1, used=False, settings={"lr": 0.5}))
    digest = call_server(one, rows.DigestTable(Index(0), 1, ""), SECONDS)
    assert (digest.count, digest.rows) == (0, 0)
    for caller in callers:
        wait(give(caller, 2, 7, used=caller is one))
    # 2 x 0.5
    assert torch.equal(
        wait(pull(two, 2, 7)).values, SPEC.make_initial_rows(torch.tensor([7])) - 1.0
    )


def decide(caller: RpcClient, step: int, *numbers: int) -> None:
    """Give, where the step isn't made by that."""
    call_server(
        caller,
        rows.PushRows(gradient(step, *numbers, settings={"lr": 1.0}), (), decided=True),
        SECONDS,
    )


def made(
    caller: RpcClient, step: int, calls: int, *, floor: int = 0, workers: tuple[int, ...] = (0, 1)
) -> None:
    call_server(
        caller,
        rows.MakeRowSteps((rows.DecidedRowStep(Index(0), step, floor),), workers, calls),
        SECONDS,
    )


def back(caller: RpcClient, step: int, calls: int) -> None:
    call_server(caller, rows.RollBackRows(((0, step),), calls), SECONDS)


def values(caller: RpcClient, step: int, *numbers: int) -> Any:
    return wait(pull(caller, step, *numbers)).values - SPEC.make_initial_rows(torch.tensor(numbers))


class TestSurviving:
    """Where losses are survived: what all have decided on is made, once."""

    def test_a_step_is_made_once_it_is_decided(self, callers: Callers) -> None:
        one, two = callers
        decide(one, 1, 5)
        decide(two, 1, 5, 6)
        assert values(one, 0, 5).sum() == 0
        for caller in callers:
            made(caller, 1, 7)
        assert values(one, 1, 5, 6).tolist() == [[-2, -2], [-1, -1]]

    def test_what_is_given_again_counts_in_place_of_the_first(self, callers: Callers) -> None:
        """The turn was dealt again, among those who are left."""
        one, two = callers
        decide(two, 1, 5)
        decide(one, 1, 5)
        decide(one, 1, 6)
        made(one, 1, 7, workers=(0,))
        assert values(one, 1, 5, 6).tolist() == [[0, 0], [-1, -1]]

    def test_a_step_goes_back_once_and_is_made_again(self, callers: Callers) -> None:
        one, two = callers
        for step in (1, 2):
            for caller in callers:
                decide(caller, step, 5)
            made(one, step, 6 + step)
        for caller in callers:
            back(caller, 0, 9)
        assert values(two, 0, 5).sum() == 0
        made(two, 1, 7)  # of who is lost, and comes late: nobody has given anything for it either
        decide(one, 1, 6)
        made(two, 1, 7, workers=(0,))
        assert values(one, 0, 6).sum() == 0
        made(one, 1, 10, workers=(0,))
        back(two, 0, 9)  # late
        assert values(one, 1, 5, 6).tolist() == [[0, 0], [-1, -1]]

    def test_what_lies_before_the_turn_does_not_go_back(self, callers: Callers) -> None:
        one, _ = callers
        for step, floor in ((1, 0), (2, 1)):
            decide(one, step, 5)
            made(one, step, step, floor=floor, workers=(0,))
        back(one, 0, 9)
        assert values(one, 1, 5).tolist() == [[-1, -1]]

    def test_a_copy_becomes_what_the_others_are(self, callers: Callers) -> None:
        one, two = callers
        decide(one, 1, 5)
        made(one, 1, 3, workers=(0,))
        state = call_server(one, rows.DescribeTable(Index(0)), SECONDS)
        assert (state.step, state.count, state.settings) == (1, 1, {"lr": 1.0})
        part = call_server(one, rows.ReadRows(Index(0), 1, "", 0, 10), SECONDS)
        call_server(two, rows.CopyTable(Index(0), 0, 1, state), SECONDS)
        assert values(two, 1, 5).sum() == 0
        assert call_server(two, rows.DescribeTable(Index(0)), SECONDS) == state
        call_server(two, rows.LoadRows(Index(0), part.names, part.tensors), SECONDS)
        assert values(one, 1, 5).tolist() == [[-1, -1]]


class TestRefusals:
    def test_different_settings(self, callers: Callers) -> None:
        one, two = callers
        wait(give(one, 1, 1, settings={"lr": 0.1}))
        with pytest.raises(Mismatch, match="with different settings"):
            wait(give(two, 1, 1, settings={"lr": 0.2}))
        with pytest.raises(Mismatch, match="with different settings"):
            wait(pull(one, 1, 1))

    def test_different_tables(self, callers: Callers) -> None:
        with pytest.raises(Mismatch, match="different tables"):
            table(callers[0], lr=0.3)

    def test_a_step_again(self, callers: Callers) -> None:
        one, two = callers
        wait(give(one, 1, 1))
        with pytest.raises(Mismatch, match="given before"):
            wait(give(one, 1, 1))
        wait(give(two, 1, 1))
        with pytest.raises(Mismatch, match="given before"):
            wait(give(two, 1, 1))
        with pytest.raises(Mismatch, match="1 have been taken"):
            wait(pull(two, 0, 1))

    def test_senseless_ones(self, callers: Callers) -> None:
        one, _ = callers
        with pytest.raises(Mismatch, match="there is no table 4"):
            call_server(one, rows.PullRows(Index(4), 0, "", torch.tensor([1])), SECONDS)
        with pytest.raises(Mismatch, match="don't lie on this server"):
            wait(pull(one, 0, 100))
        with pytest.raises(Mismatch, match="a part of it is missing"):
            one.call(rows.PullRows.kind, body={}, seconds=SECONDS)
        with pytest.raises(Mismatch, match="no worker has sent"):
            one.call("close_step", body={}, seconds=SECONDS)


class TestOutOfLockstep:
    """By messages: what is held, who makes a step, and what waits for what."""

    def hold(self, caller: RpcClient, after: int, *numbers: int, used: bool = True) -> Sent:
        return send_request(
            caller,
            rows.HoldRows(gradient(after + 1, *numbers, used=used, settings={"lr": 1.0}), after),
            SECONDS,
        )

    def close(
        self, caller: RpcClient, step: int, *workers: int, factor: float = 1.0, part: float = 1.0
    ) -> Sent:
        return send_request(
            caller, rows.CloseRowStep((Index(0),), step, workers, factor, part), SECONDS
        )

    def now(self, caller: RpcClient, free: str, step: int, *numbers: int) -> Sent:
        return send_request(
            caller, rows.PullRows(Index(0), step, free, torch.tensor(numbers)), SECONDS
        )

    def moved(self, caller: RpcClient, free: str, step: int, row: int) -> float:
        return round(
            float(
                (
                    wait(self.now(caller, free, step, row)).values
                    - SPEC.make_initial_rows(torch.tensor([row]))
                )[0, 0]
            ),
            9,
        )

    def test_a_step_is_made_once_by_those_who_are_named(self, callers: Callers) -> None:
        one, two = callers
        wait(self.hold(one, 0, 1))
        wait(self.hold(two, 0, 1))
        asked = self.now(two, "together", 1, 1)
        with pytest.raises(TimeoutError):
            wait(asked, 0.3)
        for caller in callers:
            wait(self.close(caller, 1, 0, factor=0.5, part=0.5))
        assert torch.equal(wait(asked).values, SPEC.make_initial_rows(torch.tensor([1])) - 0.25)
        assert self.moved(two, "together", 0, 1) == -0.25, "later steps may be in what is read"

    def test_what_was_late_is_in_the_next_step_or_replaced(self, callers: Callers) -> None:
        one, two = callers
        for step in (1, 2):
            wait(self.hold(one, step - 1, 1))
            wait(self.hold(two, 0, 1, 2))
            wait(self.close(one, step, 0))
        assert self.moved(two, "together", 2, 2) == 0.0
        again = self.hold(two, 3, 3)
        with pytest.raises(TimeoutError):
            wait(again, 0.3)  # what it held before may be in step 3
        wait(self.close(one, 3, 1))
        wait(again)
        wait(self.close(two, 4, 1))
        assert [self.moved(two, "together", 4, row) for row in (1, 2, 3)] == [-3.0, -1.0, -1.0]

    def test_a_step_waits_for_the_one_before(self, callers: Callers) -> None:
        one, two = callers
        wait(self.hold(one, 0, 1))
        wait(self.hold(two, 0, 2))
        early = self.close(two, 2, 1)
        with pytest.raises(TimeoutError):
            wait(early, 0.3)
        wait(self.close(one, 1, 0))
        wait(early)
        assert [self.moved(one, "together", 2, row) for row in (1, 2)] == [-1.0, -1.0]

    def test_alone(self, callers: Callers) -> None:
        """Each waits for its own steps, and for nobody's else."""
        one, two = callers
        ahead = self.now(one, "alone", 1, 4)
        with pytest.raises(TimeoutError):
            wait(ahead, 0.3)
        assert self.moved(two, "alone", 0, 4) == 0.0
        call_server(
            one, rows.ApplyRows(gradient(1, 4, settings={"lr": 1.0}), factor=2.0, part=0.5), SECONDS
        )
        assert torch.equal(wait(ahead).values, SPEC.make_initial_rows(torch.tensor([4])) - 1.0)
        assert self.moved(two, "alone", 0, 4) == -1.0

    def test_a_step_without_any_gradient_counts_for_nobody(self, callers: Callers) -> None:
        one, _ = callers
        wait(self.hold(one, 0, used=False))
        wait(self.close(one, 1, 0))
        digest = call_server(one, rows.DigestTable(Index(0), 1, "together"), SECONDS)
        assert (digest.count, digest.rows) == (0, 0)

    def test_whoever_has_come_with_nothing_is_named(self, callers: Callers) -> None:
        one, _ = callers
        wait(self.hold(one, 0, 1))
        with pytest.raises(
            Mismatch, match=r"workers \[1\] have no gradient here for step 1 of table 0"
        ):
            wait(self.close(one, 1, 0, 1))
        assert self.moved(one, "together", 0, 1) == 0.0
