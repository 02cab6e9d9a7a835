"""Messages that make no sense, from somebody who has the key: refused, whatever is in them, and
the server lives and keeps what it has.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from paceline.comm.rpc import FRAME, RpcMessage, RpcServer
from paceline.comm.wire_format import MalformedMessage
from paceline.errors import Mismatch
from paceline.notation import parse_notation
from paceline.servers.process import main, table_rpc
from paceline.servers.process.main import Server
from paceline.servers.process.table import TableSpec
from paceline.servers.protocol import parameters, recovery, rows, samples, service
from paceline.servers.protocol.message import Index, Request
from tests.harness import runs, strangers
from tests.harness.shard_plans import packed, plan

WAYS = {
    "lockstep": "ParameterServer()",
    "codec": "ParameterServer(codec=error_feedback(topk(0.5)))",
    "bound": "ParameterServer(staleness=2)",
    "backup": "ParameterServer(backup_workers=1)",
    "alone": "ParameterServer(staleness=inf)",
}
SHAPES: tuple[Any, ...] = (
    [0, 1 << 62, 1 << 62],
    [1 << 62],
    [-1],
    [],
    [3, 0],
    [16],
    [1.0],
    ["x"],
    "x",
    None,
    [1] * 17,
)
SPEC = TableSpec(rows=100, dim=2, dtype="float64", seed=3, std=1.0, rule="SGD").to_plain_data()
TABLE = Index(0)


def ones(step: int, *numbers: int) -> tuple[rows.RowGradient, ...]:
    """A gradient of these rows."""
    return (
        rows.RowGradient(
            TABLE, step, True, None, torch.tensor(numbers), torch.ones(len(numbers), 2).double()
        ),
    )


STATE = rows.TableState(SPEC, {"lr": 1.0}, count=1, step=1, discarded=0)
TABLES: list[Request[Any]] = [
    rows.OpenTable(TABLE, SPEC, {"lr": 1.0}, 0, 1),
    rows.PullRows(TABLE, 0, "", torch.tensor([1, 2])),
    rows.PushRows(ones(1, 1, 2), (0,), decided=False),
    rows.ListPushers(TABLE),
    rows.MakeRowSteps((rows.DecidedRowStep(TABLE, 1, 0),), (0,), 1),
    rows.RollBackRows(((0, 0),), 1),
    rows.DescribeTable(TABLE),
    rows.CopyTable(Index(1), 0, 1, STATE),
    rows.ApplyRows(ones(1, 3), 1.0, 1.0),
    rows.HoldRows(ones(1, 3), 0),
    rows.CloseRowStep((TABLE,), 2, (0,), 1.0, 1.0),
    rows.DigestTable(TABLE, 1, ""),
    rows.ReadRows(TABLE, 1, "", 0, 9),
    rows.ClearTable(TABLE, 1, "", 4, 1),
    rows.LoadRows(TABLE, ("ids", "values"), (torch.tensor([7]), torch.ones(1, 2).double())),
]
REST: list[Request[Any]] = [
    recovery.SkipStep(Index(0), 1),
    recovery.DiscardPushes(),
    recovery.RollBackSteps(((0, 1),)),
    recovery.ReadShard(),
    parameters.ReadMemories(),
    parameters.ListAbsent(Index(0), 1, (0, 1)),
    samples.PauseDealing(),
    samples.ListBehind(),
    samples.ListNotArrived(Index(0), 1),
    service.ReadFacts(),
    service.ReadTimeline(),
]


def said(request: Request[Any]) -> RpcMessage:
    """A request, as it comes from worker 0."""
    body, tensors = request.pack()
    return RpcMessage(request.kind, 1, 0, 0, 1, body, tuple(tensors))


class Told:
    """In place of a receiver: messages come from a list, answers are written down."""

    def __init__(self) -> None:
        self.answers: deque[RpcMessage] = deque(maxlen=3)
        self.refused = self.nbytes = self.sent = 0

    def answer(
        self,
        message: RpcMessage,
        kind: str,
        body: Mapping[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
    ) -> bool:
        found = RpcMessage(
            kind, message.number, 0, message.view, message.step, body or {}, tuple(tensors)
        )
        found.to_frames(FRAME)  # it can be sent
        self.answers.append(found)
        return True

    def refuse(self, message: RpcMessage, why: str) -> None:
        self.refused += 1
        assert self.answer(message, "refused", {"why": why[:1000]})


@cache
def recorded() -> list[list[RpcMessage]]:
    """What real workers say to real servers, one list for each server."""
    heard: list[list[RpcMessage]] = []

    class Recorder(RpcServer):
        def __init__(self, *args: Any, **parts: Any) -> None:
            super().__init__(*args, **parts)
            heard.append([])
            self._mine = heard[-1]

        def receive(self, seconds: float) -> RpcMessage | None:
            found = super().receive(seconds)
            self._mine += [] if found is None else [_kept(found)]
            return found

    def body(run: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).double()
        model, optimizer, loader = run.prepare(
            model, torch.optim.Adam(model.parameters(), 0.01), runs.batches(24)
        )
        for x, y in loader:
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            run.clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "RpcServer", Recorder)
        for text in WAYS.values():
            runs.workers(2, body, strategy=parse_notation(text))
    return heard


def _kept(found: RpcMessage) -> RpcMessage:
    tensors = tuple(x.clone() for x in found.tensors)  # the server keeps what comes, and adds to it
    return RpcMessage(
        found.kind, found.number, found.sender, found.view, found.step, found.body, tensors
    )


def _copied(found: RpcMessage, **parts: Any) -> RpcMessage:
    whole = {
        name: getattr(found, name)
        for name in ("kind", "number", "sender", "view", "step", "body", "tensors")
    } | parts
    return RpcMessage(**{**whole, "tensors": tuple(x.clone() for x in whole["tensors"])})


def wrong(drawn: random.Random, found: RpcMessage, others: Sequence[RpcMessage]) -> RpcMessage:
    """Nearly this message."""
    other, tensors, body = drawn.choice(others), list(found.tensors), dict(found.body)
    for _ in range(drawn.randrange(1, 3)):
        match drawn.randrange(9):
            case 0:
                return _copied(found, body=dict(other.body))
            case 1:
                return _copied(found, kind=other.kind)
            case 2 if tensors:
                tensors[drawn.randrange(len(tensors))] = _odd(drawn, tensors[0])
            case 3:
                tensors = drawn.choice(
                    ([], tensors[:-1], [*tensors, torch.ones(3)], list(other.tensors))
                )
            case 4:
                return _copied(
                    found,
                    sender=drawn.choice((0, 1, 7777, 1 << 62)),
                    step=drawn.choice((0, 1, found.step + 1, 1 << 62)),
                )
            case _:
                bent = strangers.bent(drawn, body)
                body = bent if isinstance(bent, dict) else body
    return _copied(found, body=body, tensors=tuple(tensors))


def _odd(drawn: random.Random, x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return drawn.choice(
        (
            *(
                x.to(torch.float16),
                x.to(torch.bool),
                x.unsqueeze(0),
                flat[: flat.numel() // 2].clone(),
                torch.zeros(0),
                torch.tensor(3),
            ),
            torch.full_like(x, -1) if x.dtype is not torch.bool else x,
            torch.frombuffer(bytearray(drawn.randbytes(max(x.nbytes, 1))), dtype=torch.uint8),
            torch.zeros([0, 5, 1 << 30]),
        )
    )


def over_the_wire(message: RpcMessage) -> RpcMessage | None:
    """As it comes, if it can be said at all and is let in."""
    try:
        frames = [
            bytearray(memoryview(frame).cast("B")) if memoryview(frame) else b""
            for frame in message.to_frames()
        ]
    except (TypeError, ValueError, OverflowError, MalformedMessage):
        return None
    try:
        return RpcMessage.from_frames(frames)
    except MalformedMessage:
        return None


def storm(
    server: Server,
    messages: Sequence[RpcMessage],
    drawn: random.Random,
    count: int,
    among: Sequence[RpcMessage],
) -> None:
    """Real messages, and between them so many that are not, as `Server.run` takes them."""
    each, slowest = -(-count // max(len(messages), 1)), 0.0
    for real in messages:
        for number in range(each + 1):
            found = over_the_wire(
                wrong(drawn, drawn.choice(among), among) if number else _copied(real)
            )
            if found is None or found.kind == "end_server":
                continue
            began = time.perf_counter()
            server._waiting_requests = server._waiting_requests[-50:]
            server.handle_message(found)
            assert 0 <= server._scheduler_rpc.compute_receive_timeout(0.1) <= 0.1
            slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 20


@pytest.mark.parametrize("count", [4000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_mutated_messages_to_servers(count: int) -> None:
    drawn, heard = random.Random(23), recorded()
    rest = [said(request) for request in REST]
    before, begun = psutil.Process().memory_info().rss, 0
    for messages in heard:
        told = Told()
        server = Server(told)  # type: ignore[arg-type]
        storm(server, messages, drawn, count // len(heard), [*messages, *rest])
        begun += server._shard_rpc.has_shard
        for request in (
            recovery.ReadShard(),
            parameters.ReadMemories(),
            service.ReadFacts(),
            service.CheckAlive(),
        ):
            server.handle_message(said(request))
        assert told.refused > count // len(heard) // 8
        assert told.answers[-1].kind == service.CheckAlive.kind
    assert begun == len(heard)
    assert psutil.Process().memory_info().rss - before < 100e6


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_mutated_messages_to_servers_of_tables(count: int) -> None:
    drawn, told = random.Random(29), Told()
    real = [said(request) for request in TABLES]
    before = psutil.Process().memory_info().rss
    for _ in range(10):
        server = Server(told)  # type: ignore[arg-type]
        storm(server, real, drawn, count // 10, real)
        server.handle_message(said(service.ReadFacts()))
        assert told.answers[-1].kind == service.ReadFacts.kind, told.answers[-1].body
    assert told.refused > count // 8
    assert psutil.Process().memory_info().rss - before < 100e6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_absurd_shapes(shape: Any) -> None:
    """Over a real connection, to a real server, from somebody with the key."""
    import msgpack

    push = parameters.PushGradient(Index(0), 1, 0, b"\1", False, False, torch.ones(1))
    head = msgpack.packb([push.kind, 1, 5, 0, 1, push.pack().body, [["float32", shape]]])
    try:
        found = RpcMessage.from_frames([head, b""])
    except MalformedMessage:
        return
    told = Told()
    server = Server(told)  # type: ignore[arg-type]
    server.handle_message(said(parameters.PlanShard(packed(plan()))))
    server.handle_message(found)
    assert told.answers[-1].kind == "refused"


PLANS: list[Any] = [
    {"size": (1 << 40, 3)},
    {"size": (-4, 3)},
    {"size": (4.0, 3)},
    {"stride": (1 << 60, 1)},
    {"stride": (3,)},
    {"size": (1 << 20, 1 << 20), "stride": (0, 0)},
]


@pytest.mark.parametrize("parts", PLANS, ids=str)
def test_absurd_plans(parts: dict[str, Any]) -> None:
    found = plan()
    found.pieces[0] = found.pieces[0]._replace(shape=found.pieces[0].shape._replace(**parts))
    told = Told()
    server = Server(told)  # type: ignore[arg-type]
    server.handle_message(said(parameters.PlanShard(packed(found))))
    assert told.answers[-1].kind == "refused" and not server._shard_rpc.has_shard
    server.handle_message(said(parameters.PlanShard(packed(plan()))))
    assert told.answers[-1].kind == parameters.PlanShard.kind


def test_what_a_server_has_stays_whole() -> None:
    """A step that can't be made changes nothing: the right one can be made then."""
    told = Told()
    server = Server(told)  # type: ignore[arg-type]

    def say(request: Request[Any], **changes: Any) -> RpcMessage:
        found = said(request)
        server.handle_message(replace(found, body={**found.body, **changes}))
        return told.answers[-1]

    say(parameters.PlanShard(packed(plan())))
    for unit in (Index(0), Index(1)):
        say(parameters.FillUnit(unit, torch.ones(16)))
        say(parameters.PushGradient(unit, 1, 0, b"\1", False, False, torch.ones(16)))
    close = parameters.CloseStep(Index(0), 1, 0, (0,), 1.0, (), decided=True)
    settings: list[Any] = [[[0, {"lr": "x"}]], [[5, {"lr": 1.0}]], [[0, {"params": []}]], [[0, 7]]]
    wrong = [{"settings": value} for value in settings] + [
        {"workers": value} for value in ([0, 0], [0, 9], [], "x")
    ]
    for changes in (
        *wrong,
        {"factor": "x"},
        {"optimizer": 9},
        {"optimizer": -1},
        {"of": [0, 0]},
        {"came": []},
    ):
        assert say(close, **changes).kind == "refused", changes
    assert say(close).kind == close.kind
    assert torch.equal(
        say(parameters.PullUnit(Index(0), 1, False)).tensors[0][:5], torch.full((5,), 0.75)
    )
    assert torch.equal(
        say(parameters.PullUnit(Index(1), 1, False)).tensors[0][:12], torch.full((12,), 0.5)
    )


@pytest.mark.parametrize(
    "spec",
    [
        {"dim": 1 << 39},
        {"dim": 0},
        {"dim": 2.0},
        {"rows": 1 << 63},
        {"rows": None},
        {"seed": "x"},
        {"std": None},
        {"dtype": "x"},
        {"rule": []},
    ],
    ids=str,
)
def test_absurd_tables(spec: dict[str, Any]) -> None:
    told = Told()
    server = Server(told)  # type: ignore[arg-type]
    opened = rows.OpenTable(TABLE, SPEC, {"lr": 1.0}, 0, 1)
    for wrong in (replace(opened, spec={**SPEC, **spec}), replace(opened, settings={"lr": "x"})):
        server.handle_message(said(wrong))
        assert told.answers[-1].kind == "refused"
    server.handle_message(said(opened))
    assert told.answers[-1].kind == opened.kind


def test_who_takes_no_turns_decides_nothing() -> None:
    server = Server(Told())  # type: ignore[arg-type]
    scheduler = server._scheduler_rpc.scheduler
    scheduler.begin_dealing(0, 0, [4], [0, 1])
    for come in (
        lambda: scheduler.record_arrival(9, 0, 1, {"part": 1.0}, 1),
        lambda: scheduler.record_gradient(9, 0, 1, {"part": 1.0}, bound=1.0, now=0.0),
    ):
        with pytest.raises(Mismatch, match="takes no turns"):
            come()


def test_what_waits_is_limited_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message that waits is kept with its tensors."""
    monkeypatch.setattr(main, "MAX_PUT_OFF_EACH", 5)
    told = Told()
    server = Server(told)  # type: ignore[arg-type]
    server.handle_message(said(rows.OpenTable(TABLE, SPEC, {"lr": 1.0}, 0, 1)))
    early = said(rows.PullRows(TABLE, 1, "", torch.tensor([1, 2])))
    for _ in range(9):
        server.handle_message(replace(early, route=b"one"))
    assert told.refused == 4 and "5 messages wait here" in told.answers[-1].body["why"]
    server.handle_message(replace(early, route=b"other"))
    assert told.refused == 4
    server.handle_message(said(rows.PushRows(ones(1, 1, 2), (0,), decided=False)))
    # all that waited are answered
    assert told.answers[-1].kind == rows.PullRows.kind and told.refused == 4
    server.handle_message(
        replace(said(rows.PullRows(TABLE, 2, "", torch.tensor([1]))), route=b"one")
    )
    assert told.refused == 4


@pytest.mark.parametrize("copied", [False, True])
def test_tables_are_limited(monkeypatch: pytest.MonkeyPatch, *, copied: bool) -> None:
    monkeypatch.setattr(table_rpc, "MAX_TABLES", 3)
    told = Told()
    server = Server(told)  # type: ignore[arg-type]
    for number in range(5):
        opened = rows.OpenTable(Index(number), SPEC, {"lr": 1.0}, 0, 1)
        server.handle_message(
            said(rows.CopyTable(Index(number), 0, 1, STATE) if copied else opened)
        )
    assert told.refused == 2 and "3 tables are here" in told.answers[-1].body["why"]
    server.handle_message(said(rows.PullRows(Index(2), int(copied), "", torch.tensor([1]))))
    assert told.answers[-1].kind == rows.PullRows.kind


def test_steps_that_may_be_undone_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is kept with the rows that were before it."""
    monkeypatch.setattr(table_rpc, "MAX_UNDOABLE_STEPS", 3)
    told = Told()
    server = Server(told)  # type: ignore[arg-type]
    server.handle_message(said(rows.OpenTable(TABLE, SPEC, {"lr": 1.0}, 0, 1)))

    def step(number: int, floor: int) -> str:
        server.handle_message(said(rows.PushRows(ones(number, 1, 2), (0,), decided=True)))
        server.handle_message(
            said(rows.MakeRowSteps((rows.DecidedRowStep(TABLE, number, floor),), (0,), number))
        )
        return told.answers[-1].kind

    assert [step(number, 0) for number in (1, 2, 3, 4)] == [rows.MakeRowSteps.kind] * 3 + [
        "refused"
    ]
    # of the turn after that
    server.handle_message(said(rows.MakeRowSteps((rows.DecidedRowStep(TABLE, 4, 3),), (0,), 4)))
    assert told.answers[-1].kind == rows.MakeRowSteps.kind
