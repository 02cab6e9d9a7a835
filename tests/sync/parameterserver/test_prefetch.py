"""Parameters that come during the next forward: the same values as with the step, whoever reads them, however late they come."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tests.harness.runs
from paceline.comm.rpc import RpcClient, RpcMessage
from paceline.errors import DeadlineExceeded, UsageError, ViewChanged
from paceline.server.main import Server
from paceline.server.protocol.parameters import PullUnit
from paceline.session.run import Run
from paceline.sync.parameterserver.client import ParameterServerSync
from paceline.sync.parameterserver.prefetch import PendingParameter
from paceline.sync.parameterserver.strategy import ParameterServer
from paceline.timings import DEFAULTS
from tests.harness.compiling import COMPILES
from tests.harness.jobs import PATIENCE
from tests.harness.parameter_servers import OPTIMIZERS, SERVED_BY, epoch, net, train, two
from tests.harness.runs import batches, cut, parameters, workers

LATE_SECONDS = 0.02


class Late(Server):
    """Answers what parameters are some time after it could, and in another order."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._chance, self._due = random.Random(5), dict[tuple[int, int], float]()
        self._scheduling.patience = lambda seconds: min(seconds, LATE_SECONDS / 4)  # type: ignore[method-assign]

    def _may(self, message: RpcMessage) -> bool:
        due = self._due.setdefault((message.sender, message.number), time.monotonic() + self._chance.random() * LATE_SECONDS)
        return time.monotonic() >= due

    def _serve(self, message: RpcMessage, request: Any) -> bool:
        return (not isinstance(request, PullUnit) or self._may(message)) and super()._serve(message, request)


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.harness.runs, "Server", Late)


def ahead(servers: int = 2, **options: Any) -> ParameterServer:
    return ParameterServer(servers, bucket_mb=0.005, pull="forward", **options)


def stepwise(servers: int = 2, **options: Any) -> ParameterServer:
    return ParameterServer(servers, bucket_mb=0.005, **options)


def same(size: int, body: Callable[[Run], Any], *, servers: int = 2, **options: Any) -> list[Any]:
    """What `body` gives on each worker, which is bit for bit what it gives with parameters that come with the step."""
    found = workers(size, body, strategy=ahead(servers, **options))
    wanted = workers(size, body, strategy=stepwise(servers, **options))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    return found


def coming(model: nn.Module) -> set[str]:
    """Which of its parameters are on their way."""
    return {name for name, parameter in model.named_parameters() if type(parameter) is PendingParameter}


class TestTheSameBitForBit:
    @pytest.mark.alike(2)
    @SERVED_BY
    def test_with_uneven_shares(self, size: int, servers: int, kind: str) -> None:
        shares = None if size == 1 else cut(*range(1, size + 1))
        found = same(size, lambda run: train(run, kind, epochs=2, shares=shares, rate=0.7, clip=0.6), servers=servers)
        assert all(torch.equal(other, found[0]) for other in found)

    @pytest.mark.parametrize("options", [{"accumulate": 2}, {"clip": 0.05, "accumulate": 2}, {"dtype": torch.float32}])
    def test_micro_batches(self, options: dict[str, Any]) -> None:
        same(2, lambda run: train(run, "adam", epochs=1, **options))

    @pytest.mark.parametrize("codec", ["int8()", "error_feedback(topk(0.1))", "error_feedback(int8())"])
    def test_through_a_codec(self, codec: str) -> None:
        from paceline.notation import parse

        same(2, lambda run: train(run, "momentum", epochs=1, dtype=torch.float32), codec=parse(codec))

    @pytest.mark.slow
    def test_through_a_codec_workers_are_equal_when_replicas_are_looked_at(self) -> None:
        from paceline.notation import parse

        found = same(3, lambda run: train(run, "adam", epochs=1, dtype=torch.float32), codec=parse("error_feedback(topk(0.05))"))
        assert all(torch.equal(other, found[0]) for other in found)


def turns(each: Any, model: Any = net, *, count: int = 3, kind: str = "momentum") -> Callable[[Run], Tensor]:
    """So many steps, after each of which `each(run, model, x, step)` may give something; gives all of it, and the parameters."""

    def body(run: Run) -> Tensor:
        made = model()
        optimizer = OPTIMIZERS[kind](made.parameters())
        made, optimizer, loader = run.prepare(made, optimizer, batches(count * 8))
        seen = []
        for step, (x, y) in enumerate(loader):
            F.mse_loss(made(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            given = each(run, made, x, step)
            if isinstance(given, Tensor):
                seen.append(given.detach().flatten().clone())
        return torch.cat([*seen, parameters(made)])

    return body


def saved(run: Run, model: nn.Module, x: Tensor, step: int) -> Tensor:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)["0.weight"]


def bare(run: Run, model: nn.Module, x: Tensor, step: int) -> Tensor:
    """A gradient by torch.func, of the model itself."""
    found = torch.func.grad(lambda named: torch.func.functional_call(model, named, (x,)).pow(2).mean())(dict(model.named_parameters()))
    return found["0.weight"]


def in_inference(run: Run, model: nn.Module, x: Tensor, step: int) -> Tensor:
    with torch.inference_mode():
        return model(x).clone()


def counted(run: Run, model: nn.Module, x: Tensor, step: int) -> Tensor:
    with FlopCounterMode(display=False):
        return model(x)


def in_a_thread(run: Run, model: nn.Module, x: Tensor, step: int) -> Tensor:
    found = []
    thread = threading.Thread(target=lambda: found.append(model[2].weight.norm()))
    thread.start()
    out = model(x)
    thread.join()
    return torch.cat([out.flatten(), found[0].view(1)])


def overwritten(run: Run, model: nn.Module, x: Tensor, step: int) -> None:
    """Until the next step it is what the user has made of it."""
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        assert torch.equal(model[0].weight, model[0].weight.clone())


def loaded(run: Run, model: nn.Module, x: Tensor, step: int) -> Tensor:
    model.load_state_dict({name: torch.ones_like(p) for name, p in model.named_parameters()})
    return model(x)


READERS: dict[str, Callable[..., Any]] = {
    "forward": lambda run, model, x, step: model(x),
    "a part's forward": lambda run, model, x, step: model[2](torch.ones(1, 300, dtype=torch.float64)),
    "forward without its hooks": lambda run, model, x, step: model.forward(x),
    "state_dict": lambda run, model, x, step: model.state_dict()["2.weight"],
    "torch.save": saved,
    "deepcopy": lambda run, model, x, step: copy.deepcopy(model)(x),
    "a copied parameter": lambda run, model, x, step: copy.deepcopy(model[0].weight),
    "pickle": lambda run, model, x, step: pickle.loads(pickle.dumps(model))[0].weight,
    "named_parameters": lambda run, model, x, step: torch.stack([p.norm() for _, p in model.named_parameters()]),
    "foreach": lambda run, model, x, step: torch.stack(torch._foreach_norm(list(model.parameters()))),
    "one vector": lambda run, model, x, step: parameters(model),
    "data": lambda run, model, x, step: model[0].weight.data.clone(),
    "numpy": lambda run, model, x, step: torch.from_numpy(model[0].weight.detach().numpy().copy()),
    "an item": lambda run, model, x, step: torch.tensor(model[0].weight[1, 2].item()),
    "a list": lambda run, model, x, step: torch.tensor(model[4].bias.tolist()),
    "its text": lambda run, model, x, step: torch.tensor([ord(letter) for letter in repr(model[4].bias)], dtype=torch.float64),
    "an average": lambda run, model, x, step: parameters(averaged(model)),
    "functional_call": lambda run, model, x, step: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    "torch.func": bare,
    "vmap": lambda run, model, x, step: torch.vmap(model)(x),
    "inference": in_inference,
    "a mode": counted,
    "a thread": in_a_thread,
    "compiled": lambda run, model, x, step: torch.compile(model, backend="eager")(x),
    "overwritten": overwritten,
    "loaded": loaded,
    "run.mean": lambda run, model, x, step: run.mean(model[0].weight.sum()),
    "nothing": lambda run, model, x, step: None,
}
QUICK = ("forward", "state_dict", "deepcopy", "torch.func", "a thread", "overwritten")
MARKS: dict[str, Any] = {**dict.fromkeys(QUICK, ()), "compiled": (pytest.mark.slow, COMPILES), "loaded": pytest.mark.slow, "nothing": ()}
OTHERS = [name for name in READERS if name not in MARKS]  # they give a value, and leave the parameters as they are


def averaged(model: nn.Module) -> nn.Module:
    made = AveragedModel(model)
    made.update_parameters(model)
    return made


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def test_whoever_reads_between_the_step_and_forward(name: str) -> None:
    """Sees what they are after the step, and what is trained afterwards is the same."""
    same(2, turns(READERS[name]))


def read_in_turn(strategy: ParameterServer) -> dict[tuple[str, int, int], Tensor]:
    """Give what all others read by name, step and rank, each alone after its step; and the parameters in the end."""
    seen: dict[tuple[str, int, int], Tensor] = {}

    def each(run: Run, model: nn.Module, x: Tensor, step: int) -> None:
        name = OTHERS[step % len(OTHERS)]
        seen[name, step, run.rank] = torch.as_tensor(READERS[name](run, model, x, step)).detach().flatten().clone()

    ends = workers(2, turns(each, count=len(OTHERS)), strategy=strategy)
    return seen | {("end", 0, rank): end for rank, end in enumerate(ends)}


def test_all_others_read_one_after_the_other() -> None:
    found, wanted = read_in_turn(ahead()), read_in_turn(stepwise())
    assert len(found) == 2 * len(OTHERS) + 2 and found.keys() == wanted.keys()
    assert [where for where, values in wanted.items() if not torch.equal(found[where], values)] == []


def test_they_are_on_their_way_when_the_step_returns_and_there_after_forward() -> None:
    """What doesn't read values doesn't wait."""

    def each(run: Run, model: nn.Module, x: Tensor, step: int) -> None:
        everything = {name for name, _ in model.named_parameters()}
        model.zero_grad()
        assert all(p.grad is None and p.shape == p.size() and p.requires_grad and p.is_leaf for p in model.parameters())
        assert coming(model) == everything
        model[2](torch.ones(1, 300, dtype=torch.float64))
        assert coming(model) < everything and not {"2.weight", "2.bias"} & coming(model)
        model(x)
        assert not coming(model)

    workers(2, turns(each), strategy=ahead())


def test_by_default_nothing_is_on_its_way() -> None:
    workers(2, turns(lambda run, model, x, step: pytest.fail("awaited") if coming(model) else None), strategy=stepwise())


class Tied(nn.Module):
    """Uses a child's weight without calling the child, first; one weight is two modules'; one parameter is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.last, self.scale = nn.Linear(6, 6), net(), nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.double()
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.body(F.linear(x, self.last.weight) * self.scale + self.first(x) + self.last(x))


class Apart(torch.autograd.Function):
    """As an operation in C++ sees a parameter: torch doesn't ask it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch._C.DisableTorchFunction():
            return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class Foreign(nn.Module):
    """A module of the user's own, with an operation in C++."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6, dtype=torch.float64))
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(Apart.apply(x, self.weight))


class Recurrent(nn.Module):
    """Keeps a list of its parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.body = nn.LSTM(6, 6).double(), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.cells(x)[0])


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.reentrant = nn.Linear(6, 6).double(), net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.body, self.first(x), use_reentrant=self.reentrant, preserve_rng_state=False)
        return found


SCRIPTING = threading.Lock()  # torch.jit is for one thread at a time


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with SCRIPTING:
            self.script, self.body = torch.jit.script(nn.Linear(6, 6).double()), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.script(x))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(6, 6).double().requires_grad_(requires_grad=False), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.first(x))


class Flat(nn.Module):
    """Two parameters are views of one memory, which forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.ones(12, dtype=torch.float64)
        self.one, self.other, self.body = nn.Parameter(self.memory[:6]), nn.Parameter(self.memory[6:]), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.memory.sum() * self.one + self.other)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model, generator = make(), torch.Generator().manual_seed(4)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2)
        return model

    return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "an operation in C++": Foreign,
    "an LSTM": Recurrent,
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed, reentrant": lambda: Recomputed(reentrant=True),
    "scripted": Scripted,
    "frozen": Frozen,
    "one memory": Flat,
}


@pytest.mark.parametrize("name", MODELS)
def test_whatever_uses_them_in_forward(name: str) -> None:
    same(2, turns(lambda run, model, x, step: None, seeded(MODELS[name])))


def test_what_torch_does_not_ask_comes_with_the_step() -> None:
    def each(run: Run, model: nn.Module, x: Tensor, step: int) -> None:
        assert any(name.startswith("body") for name in coming(model)) and not any(not name.startswith("body") for name in coming(model))

    for make in (Scripted, Flat):
        workers(2, turns(each, seeded(make)), strategy=ahead())


def test_modules_that_some_turns_leave_out() -> None:
    """Their parameters come before the next push, and are what they are when they are used again."""

    def body(run: Run) -> Tensor:
        always, some = net(), net()
        optimizer = OPTIMIZERS["adam"]([*always.parameters(), *some.parameters()])
        always, some, optimizer, loader = run.prepare(always, some, optimizer, batches())
        for _ in run.epochs(1):
            for step, (x, y) in enumerate(loader):
                loss = F.mse_loss(always(x), y)
                if step % 3 == 1:
                    loss = loss + some(x).pow(2).mean()
                loss.backward()
                assert not coming(some)
                optimizer.step()
                optimizer.zero_grad()
        return parameters(always, some)

    same(3, body)


def test_several_optimizers_and_several_forwards_in_a_turn() -> None:
    """As GANs have them; one steps in every other turn, and once the other is still on its way."""

    def body(run: Run) -> Tensor:
        one, other, first, second, loader = run.prepare(*two(), batches())
        for _ in run.epochs(1):
            for step, (x, y) in enumerate(loader):
                (F.mse_loss(other(one(x).detach()), y) + other(one(-x)).mean()).backward()
                second.step()
                second.zero_grad()
                if step % 2:
                    with run.no_sync():
                        F.mse_loss(other(one(x)), y).backward()
                    F.mse_loss(other(one(x)), y).backward()
                    first.step()
                    second.step()
                    first.zero_grad()
                    second.zero_grad()
        return parameters(one, other)

    same(3, body)


def test_evaluated_and_saved_in_the_middle_and_resumed(tmp_path: Path) -> None:
    def body(run: Run, *, saves: bool) -> Tensor:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        model, optimizer, loader = run.prepare(model, optimizer, batches())
        test = run.prepare(batches(16), train=False)
        seen: list[Tensor] = []
        if not saves:
            assert run.resume(tmp_path / str(run._parts.strategy.pull) / "test")
        for _ in run.epochs(2):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.steps == 3:
                    model.eval()
                    with torch.no_grad():
                        seen += [run.mean(F.mse_loss(model(x), y)).view(1) for x, y in test]
                    model.train()
                if run.steps == 6 and saves:
                    run.save()
        return torch.cat([*seen, parameters(model)])

    found = {}
    for strategy in (ahead(), stepwise()):
        whole = workers(3, lambda run: body(run, saves=True), strategy=strategy, folder=tmp_path / strategy.pull)
        again = workers(2, lambda run: body(run, saves=False), strategy=strategy)
        found[strategy.pull] = whole[0], again[0]
    assert torch.equal(found["forward"][0], found["step"][0]) and torch.equal(found["forward"][1], found["step"][1])
    assert (found["step"][1] - found["step"][0][-len(found["step"][1]) :]).abs().max() < 1e-9


@pytest.mark.each_choice
@pytest.mark.parametrize("options", [{"staleness": float("inf")}, {"staleness": 2}], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_not_in_lockstep_each_gradient_is_in_the_weights(options: dict[str, Any], size: int) -> None:
    found = epoch(ParameterServer(2, pull="forward", **options), size, epochs=2)
    assert sorted(sample for ids, _, _ in found for sample in ids) == sorted([*range(60)] * 2)
    for _, weights, steps in found:
        assert torch.allclose(weights, torch.full((60,), -2 / 6, dtype=torch.float64), rtol=1e-12) and steps == found[0][2]


def test_with_backup_workers_what_is_dropped_is_dealt_again() -> None:
    strategy = ParameterServer(2, backup_workers=1, requeue=True, pull="forward")
    found = epoch(strategy, slow=lambda rank: 0.02 if rank == 1 else 0.002)
    assert {sample for ids, _, _ in found for sample in ids} == {*range(60)}
    assert all(torch.equal(weights, found[0][1]) for _, weights, _ in found) and bool((found[0][1] < 0).all())


def test_a_graph_of_before_the_step_is_refused_as_ever() -> None:
    def body(run: Run) -> Tensor:
        model = net()
        model, optimizer, loader = run.prepare(model, OPTIMIZERS["sgd"](model.parameters()), batches())
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, [model[0].weight])
            optimizer.zero_grad()
        return parameters(model)

    same(2, body)


@pytest.mark.parametrize("clips", [False, True])
def test_a_gradient_of_values_that_nobody_waited_for_is_refused(*, clips: bool) -> None:
    """torch.func on bare parameters, without the model's forward: torch asks nobody."""

    def body(run: Run) -> None:
        model = net()
        model, optimizer, loader = run.prepare(model, OPTIMIZERS["sgd"](model.parameters()), batches())
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()  # zeros are no such gradients
            optimizer.zero_grad()
            found = torch.func.grad(lambda weight, x=x: (x @ weight.t()).pow(2).mean())(model[0].weight)
            model[0].weight.grad = found
            with pytest.raises(UsageError, match=r"0\.weight has a gradient, and was still on its way"):
                run.clip(model, 1.0) if clips else optimizer.step()
            return

    workers(2, body, strategy=ahead())


def test_gradients_that_nobody_cleared_are_no_new_ones() -> None:
    """Those of an optimizer whose parameters a backward leaves out, which steps again."""

    def body(run: Run) -> Tensor:
        one, other = net(), net()
        first, second = (OPTIMIZERS["momentum"](model.parameters()) for model in (one, other))
        one, other, first, second, loader = run.prepare(one, other, first, second, batches())
        for step, (x, y) in enumerate(loader):
            (F.mse_loss(one(x), y) + (0 if step % 2 else other(x).mean())).backward()
            first.step()
            first.zero_grad()
            second.step()
        return parameters(one, other)

    same(2, body)


class Awaiting(Late):
    """The only server: answers what parameters are so long after a worker has begun to wait for the answer."""

    waits: ClassVar[dict[tuple[int, int], float]] = {}  # when, by the worker and the message's number

    def _may(self, message: RpcMessage) -> bool:
        return time.monotonic() >= self.waits.get((message.sender, message.number), math.inf) + LATE_SECONDS


def test_what_it_takes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds for which forward waits are those of the exchange, in the trace and in each step's line."""
    wait = RpcClient.wait

    def waiting(caller: RpcClient, number: int, seconds: float) -> RpcMessage:
        Awaiting.waits.setdefault((caller._sender, number), time.monotonic())
        return wait(caller, number, seconds)

    def body(run: Run) -> tuple[float, list[float]]:
        train(run, "adam", epochs=2)
        spans = [span for span in run._context.trace.spans() if span.name == "parameters" and span.kind == "exchange"]
        return run._context.pulling, [(span.end - span.start) / 1e9 for span in spans]

    monkeypatch.setattr(RpcClient, "wait", waiting)
    monkeypatch.setattr(tests.harness.runs, "Server", Awaiting)
    monkeypatch.setattr(Awaiting, "waits", {})
    for seconds, spans in workers(2, body, strategy=ahead(1), folder=tmp_path):
        assert len(spans) >= 9 and min(spans) > LATE_SECONDS - 1e-3
        assert seconds == pytest.approx(sum(spans), abs=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "test" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["seconds"]["exchange"] for line in lines) > 9 * (LATE_SECONDS - 1e-3)


class Mute(Server):
    """Doesn't answer what parameters are any more, once `mute` has been set."""

    mute = threading.Event()

    def _serve(self, message: RpcMessage, request: Any) -> bool:
        return not (isinstance(request, PullUnit) and self.mute.is_set()) and super()._serve(message, request)


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(tests.harness.runs, "Server", Mute)
    yield Mute.mute
    Mute.mute.clear()


def test_a_wait_that_passes_its_deadline_says_for_what(mute: threading.Event) -> None:
    """Whatever is tried then says so, and the run ends with plain parameters."""
    kept, said = list[nn.Module](), list[str]()

    def each(run: Run, model: nn.Module, x: Tensor, step: int) -> None:
        kept.append(model)
        sync = run._backward.sync
        assert isinstance(sync, ParameterServerSync)
        if step == 0:
            model(x)
            run.barrier()  # all have what was asked for before
            mute.set()
        else:
            sync.context.deadline = 0.3
            with pytest.raises(DeadlineExceeded, match=r"server 0 on here has not answered .* is on its way from there"):
                model(x)
            with pytest.raises(DeadlineExceeded):
                model.state_dict()
            raise DeadlineExceeded("seen")

    with pytest.raises(DeadlineExceeded, match="seen"):
        workers(2, turns(each), strategy=ahead(1), said=said)
    assert not any(coming(model) for model in kept)
    assert any("has not come: there are older values in the model" in line for line in said)


def test_who_fails_between_the_step_and_forward_has_what_the_step_has_made() -> None:
    """And all have plain parameters; servers end with the first worker, so others may not have had all by then."""
    kept: dict[int, nn.Module] = {}
    wanted = workers(2, turns(lambda run, model, x, step: parameters(model)), strategy=stepwise())[0]

    def each(run: Run, model: nn.Module, x: Tensor, step: int) -> None:
        kept[run.rank] = model
        run.barrier()  # or this worker may fail before the other has pushed: nobody makes that step
        if run.rank == 0:
            run._context.timings = replace(DEFAULTS, servers=replace(DEFAULTS.servers, last_pull=PATIENCE))
            raise ZeroDivisionError
        run.barrier()

    with pytest.raises((ZeroDivisionError, ViewChanged)):  # of whichever worker was through first
        workers(2, turns(each), strategy=ahead())
    assert torch.equal(parameters(kept[0]), wanted[: parameters(kept[0]).numel()])
    assert not any(coming(model) or model._forward_pre_hooks for model in kept.values())


@pytest.mark.parametrize(("options", "why"), [({"pull": "later"}, "possible: forward, step")])
def test_what_can_not_be_asked_for(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ParameterServer(**options)
