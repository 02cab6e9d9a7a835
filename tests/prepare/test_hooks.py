"""What run.prepare takes, gives back, leaves as it was, and refuses."""

from __future__ import annotations

import copy
import io
import pickle
import socket
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from paceline.data.loader import ShareLoader
from paceline.errors import DataError, UsageError
from paceline.session.run import Run
from tests.harness.compiling import COMPILES
from tests.harness.models import fill, net, sgd
from tests.harness.runs import alone, batches, distance, parameters, workers


def advance(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()


# ---- what comes back


@pytest.mark.parametrize("size", [1, 2])
def test_any_order_in_the_same_order_out(size: int) -> None:
    def body(run: Run) -> None:
        model = net()
        opt = sgd(model)
        scheduler, scaler, data = StepLR(opt, 2), torch.amp.GradScaler("cpu"), batches()
        given = [scaler, data, opt, model, scheduler]
        ready = run.prepare(*given)
        assert isinstance(ready, tuple) and len(ready) == 5
        assert (
            isinstance(ready[1], ShareLoader)
            and len(ready[1]) == 5
            and ready[1].dataset is data.dataset
        )
        assert all(a is b for n, (a, b) in enumerate(zip(ready, given, strict=True)) if n != 1)
        assert run._prepared.state.names == (
            "progress",
            "model",
            "optimizer",
            "scheduler",
            "scaler",
            "loader",
        )

    workers(size, body)


@pytest.mark.parametrize("size", [1, 2])
def test_a_single_object_comes_back_bare(size: int) -> None:
    def body(run: Run) -> None:
        model = net()
        assert run.prepare(model) is model
        opt = sgd(model)
        assert run.prepare(opt) is opt
        assert isinstance(run.prepare(batches()), ShareLoader)
        assert run.prepare() == ()

    workers(size, body)


@pytest.mark.parametrize("size", [1, 2])
def test_model_and_optimizer_stay_what_they_are(size: int) -> None:
    def body(run: Run) -> None:
        model = net()
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        keys, kinds, ids = (
            list(model.state_dict()),
            (type(model), type(opt)),
            [id(p) for p in model.parameters()],
        )
        model, opt, loader = run.prepare(model, opt, batches())
        for x, y in loader:
            advance(model, opt, x, y)
        assert list(model.state_dict()) == keys and (type(model), type(opt)) == kinds
        assert (
            [id(p) for p in model.parameters()]
            == ids
            == [id(p) for p in opt.param_groups[0]["params"]]
        )
        twin = copy.deepcopy(model)
        assert torch.equal(parameters(twin), parameters(model))
        x = torch.ones(3, 6, dtype=torch.float64)
        with torch.no_grad():
            assert torch.equal(twin(x), model(x))
        twin.zero_grad()
        twin(x).sum().backward()  # a copy is not the run's: nothing is exchanged
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        assert torch.equal(parameters(again), parameters(model)) and torch.equal(again(x), model(x))
        again.zero_grad()
        again(x).sum().backward()
        assert again[0].weight.grad is not None and model[0].weight.grad is not again[0].weight.grad
        other = pickle.loads(pickle.dumps(opt))
        assert other.state_dict()["state"].keys() == opt.state_dict()["state"].keys()

    workers(size, body)


def test_a_pickled_model_needs_no_paceline() -> None:
    def body(run: Run) -> None:
        model = net()
        opt = sgd(model)
        model, opt, loader = run.prepare(model, opt, batches())
        for x, y in loader:
            advance(model, opt, x, y)
        pickled = pickle.dumps(model)
        assert b"paceline" not in pickled
        assert torch.equal(pickle.loads(pickled)(x), model(x)) and torch.equal(
            copy.deepcopy(model)(x), model(x)
        )

    workers(2, body)


def test_a_model_with_synchronous_batchnorm_can_be_pickled() -> None:
    def body(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
        run.prepare(model)
        twin = pickle.loads(pickle.dumps(model)).eval()
        x = torch.ones(3, 6, dtype=torch.float64)
        assert torch.equal(twin(x), copy.deepcopy(model).eval()(x))

    workers(2, body)


def test_the_users_methods_come_back_when_the_run_ends() -> None:
    models = []

    def body(run: Run) -> None:
        model = nn.Sequential(
            fill(nn.Linear(6, 4).double()),
            nn.BatchNorm1d(4).double(),
            fill(nn.Linear(4, 2).double()),
        )
        opt = sgd(model)
        before = StepLR(opt, 1)
        _, _, scheduler, _ = run.prepare(model, opt, before, batches())
        models.append((model, opt, scheduler))

    workers(2, body)
    for model, opt, scheduler in models:
        assert not model._forward_pre_hooks
        x = torch.ones(3, 6, dtype=torch.float64)
        with pytest.raises(ValueError, match="more than 1 value"):  # torch's own BatchNorm
            model(x[:1])
        advance(model, opt, x, x[:, :2])
        scheduler.step()
        assert scheduler.last_epoch == 1


def test_the_same_objects_in_two_runs_one_after_the_other() -> None:
    model = net()
    opt = sgd(model)

    def body(run: Run) -> Tensor:
        ready, optimizer, loader = run.prepare(model, opt, batches())
        for x, y in loader:
            advance(ready, optimizer, x, y)
        return parameters(model)

    alone(body)
    second = alone(body)
    fresh = net()
    plain = sgd(fresh)
    for _ in range(2):
        for x, y in batches():
            advance(fresh, plain, x, y)
    assert distance(second, parameters(fresh)) < 1e-12


# ---- twice, and in several calls


@pytest.mark.parametrize("size", [1, 2])
def test_prepared_twice_is_prepared_once(size: int) -> None:
    def body(run: Run) -> Tensor:
        model = net()
        opt = sgd(model)
        scheduler = StepLR(opt, 3, 0.5)
        run.prepare(model, opt)
        model, opt, scheduler, loader = run.prepare(model, opt, scheduler, batches())
        run.prepare(scheduler)
        for x, y in loader:
            advance(model, opt, x, y)
            scheduler.step()
        names = run._prepared.state.names
        assert scheduler.last_epoch == 5 and names.count("model") == 1 and "model1" not in names
        return parameters(model)

    for found in workers(size, body):
        assert distance(found, alone(body)) < 1e-12


@pytest.mark.parametrize("calls", ["one", "several"])
def test_two_models(calls: str) -> None:
    def body(run: Run) -> Tensor:
        one, two = net(1), net(2)
        first, second = sgd(one), torch.optim.Adam(two.parameters(), lr=0.01)
        if calls == "one":
            one, two, first, second, loader = run.prepare(one, two, first, second, batches())
        else:
            one, first = run.prepare(one, first)
            loader = run.prepare(batches())
            two, second = run.prepare(two, second)
        assert {name for name in run._prepared.state.names if name.startswith("model")} == {
            "model",
            "model1",
        }
        for x, y in loader:
            advance(one, first, x, y)
            advance(two, second, x, y - one(x).detach())
        return parameters(one, two)

    wanted = alone(body)
    for found in workers(2, body):
        assert distance(found, wanted) < 1e-10


def test_a_parameter_that_only_the_optimizer_knows() -> None:
    def body(run: Run) -> Tensor:
        model = net()
        scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        opt = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        model, opt, loader = run.prepare(model, opt, batches())
        for x, y in loader:
            opt.zero_grad()
            F.mse_loss(model(x) * scale, y).backward()
            opt.step()
        return torch.cat([parameters(model), scale.detach()])

    wanted = alone(body)
    for found in workers(2, body):
        assert distance(found, wanted) < 1e-12


# ---- differences between workers


def test_different_values_are_replaced_with_one_warning() -> None:
    said: list[str] = []

    def body(run: Run) -> Tensor:
        model = net(seed=run.rank)
        model.register_buffer("scale", torch.full((2, 2), float(run.rank)))
        model.register_buffer("few", torch.zeros(0))
        model, _ = run.prepare(model, batches())
        assert not model.scale.any()
        return parameters(model)

    found = workers(3, body, said=said)
    assert all(torch.equal(one, parameters(net(0))) for one in found)
    assert [text for text in said if "differed" in text] == [
        (
            "parameters or buffers of rank 1, 2 differed from rank 0's and were replaced by "
            "those of rank 0 (seed all workers alike to avoid it)"
        )
    ]


def test_equal_values_are_not_warned_of() -> None:
    said: list[str] = []
    workers(2, lambda run: run.prepare(net(), batches()), said=said)
    assert len(said) == 1 and said[0].startswith(
        "2 workers on 1 host, AllReduce(), global batch 8 = 2 x 4"
    )


def model_of(rank: int, how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    lr = 0.1
    if rank == 1:
        if how == "shape":
            model[2] = nn.Linear(5, 3).double()
        elif how == "name":
            model.extra = nn.Linear(2, 2)
        elif how == "dtype":
            model[2].float()
        elif how == "frozen":
            model[0].weight.requires_grad_(False)
        elif how == "lr":
            lr = 0.2
        elif how == "order":
            return model, torch.optim.SGD(reversed(list(model.parameters())), lr=lr)
        elif how == "kind":
            return model, torch.optim.Adam(model.parameters(), lr=lr)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("shape", r"2\.weight \[2, 5\].*rank 1 has 2\.weight \[3, 5\]"),
        ("name", r"extra\.weight"),
        ("dtype", r"2\.weight \[2, 5\] torch\.float64.*rank 1 has.*torch\.float32"),
        ("frozen", r"rank 1 has 0\.weight.*frozen"),
        ("lr", r"lr=0\.1.*rank 1 has.*lr=0\.2"),
        ("order", r"group 0 of SGD"),
        ("kind", r"of SGD.*rank 1 has.*of Adam"),
    ],
)
def test_a_different_model_on_one_worker_is_named_on_all(how: str, named: str) -> None:
    caught: list[int] = []

    def body(run: Run) -> None:
        with pytest.raises(UsageError, match=named):
            run.prepare(*model_of(run.rank, how))
        caught.append(run.rank)

    workers(3, body)
    assert sorted(caught) == [0, 1, 2]


# ---- what is refused


@pytest.fixture
def process_group() -> Any:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_models_that_are_distributed_already(process_group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    with pytest.raises(UsageError, match=r"DistributedDataParallel already.*model\.module"):
        alone(lambda run: run.prepare(DistributedDataParallel(net())))
    with pytest.raises(UsageError, match="FullyShardedDataParallel already"):
        alone(
            lambda run: run.prepare(FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
        )
    sharded = net()
    # torch keeps the group of a DTensor for each thread; kept by the main thread, it hangs every
    # process that a test forks from another.
    sharding = threading.Thread(
        target=lambda: fully_shard(
            sharded, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        )
    )
    sharding.start()
    sharding.join()
    with pytest.raises(UsageError, match="is a DTensor"):
        alone(lambda run: run.prepare(sharded))
    with pytest.raises(UsageError, match=r"DataParallel already.*model\.module"):
        alone(lambda run: run.prepare(nn.DataParallel(net())))


def test_distributed_samplers(process_group: None) -> None:
    data = TensorDataset(torch.zeros(8, 6))
    loader = DataLoader(
        data, batch_size=4, sampler=DistributedSampler(data, num_replicas=1, rank=0)
    )
    with pytest.raises(DataError, match="DistributedSampler"):
        alone(lambda run: run.prepare(loader))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda: torch.optim.LBFGS(net().parameters()), "LBFGS"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), "lazy module"),
        (lambda: 5, "got a builtins.int; it takes models"),
        (lambda: None, "got a builtins.NoneType"),
        (lambda: torch.zeros(3), "got a torch.Tensor"),
        (lambda: F.mse_loss, "run.keep"),
    ],
)
def test_what_cannot_be_prepared(value: Any, named: str) -> None:
    for size in (1, 2):
        with pytest.raises(UsageError, match=named):
            workers(size, lambda run: run.prepare(value()))


def test_a_loader_prepared_before() -> None:
    def body(run: Run) -> None:
        run.prepare(run.prepare(batches()))

    with pytest.raises(UsageError, match="prepared before"):
        alone(body)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batchnorm": "no"}, "batchnorm='no' is unknown; possible: local, sync"),
        ({"loss": "max"}, "possible: mean, sum"),
        ({"accumulate": 2}, "run.step"),
        ({"shares": [1, 2, 3, 4]}, "4 numbers for 2 workers"),
        ({"shares": [0, 0]}, "at least one above zero"),
        ({"readers": "host"}, "leave it out"),
        ({"loss": "sum", "weigh": len}, "leave one of them out"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        workers(2, lambda run: run.prepare(batches(), **options))


def test_different_terms_on_one_worker() -> None:
    def body(run: Run) -> None:
        loader = run.prepare(batches(), shares=[1, 1 + run.rank])
        next(iter(loader))

    with pytest.raises(DataError, match="on different terms: shares"):
        workers(2, body)


# ---- schedulers


def schedulers(opt: torch.optim.Optimizer) -> list[Any]:
    return [
        StepLR(opt, 2, 0.5),
        CosineAnnealingLR(opt, 5),
        LambdaLR(opt, lambda step: 0.9**step),
        OneCycleLR(opt, 0.2, total_steps=20),
        SequentialLR(opt, [LinearLR(opt, 0.1, total_iters=2), StepLR(opt, 1, 0.9)], [2]),
        ChainedScheduler([LinearLR(opt, 0.1, total_iters=2), StepLR(opt, 1, 0.9)]),
    ]


@pytest.mark.parametrize("which", range(6))
@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.filterwarnings("error:Seems like")
def test_schedulers_step_with_the_optimizer_and_their_state_is_their_own(which: int) -> None:
    def body(run: Run) -> list[float]:
        model = net()
        opt = sgd(model)
        scheduler = schedulers(opt)[which]
        model, opt, loader, scheduler = run.prepare(model, opt, batches(), scheduler)
        rates = []
        for x, y in loader:
            advance(model, opt, x, y)
            scheduler.step()
            rates.append(opt.param_groups[0]["lr"])
        state = scheduler.state_dict()
        assert not any(callable(value) for value in state.values())
        torch.save(state, io.BytesIO())
        scheduler.load_state_dict(state)
        return rates

    wanted = alone(body)
    assert len(set(wanted)) > 1
    assert workers(2, body) == [wanted] * 2


def test_reduce_on_plateau() -> None:
    def body(run: Run, metric: Any) -> float:
        model = net()
        opt = sgd(model)
        scheduler = ReduceLROnPlateau(opt, patience=0, factor=0.5)
        model, opt, loader, scheduler = run.prepare(model, opt, batches(), scheduler)
        for x, y in loader:
            advance(model, opt, x, y)
            scheduler.step(metric(run))
        assert "step" not in scheduler.state_dict()
        return float(opt.param_groups[0]["lr"])

    assert (
        workers(2, lambda run: body(run, lambda run: run.mean(1.0 + run.rank)))
        == [0.1 * 0.5**4] * 2
    )
    with pytest.raises(
        UsageError, match=r"different metrics \(1 on rank 0, 2 on rank 1\).*run\.mean"
    ):
        workers(2, lambda run: body(run, lambda run: 1.0 + run.rank))


# ---- batchnorm


def normed() -> nn.Module:
    return fill(
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double(), 3
    )


@pytest.mark.parametrize(("size", "shares"), [(2, None), (2, [1, 7]), (2, [0, 8]), (3, [3, 3, 2])])
def test_batchnorm_is_of_the_global_batch(size: int, shares: Any) -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model = normed()
        model, opt, loader = run.prepare(model, sgd(model), batches(21, 8), shares=shares)
        for _ in run.epochs(2):
            for x, y in loader:
                advance(model, opt, x, y)
        return torch.cat([parameters(model), *(b.reshape(-1).double() for b in model.buffers())])

    wanted = alone(lambda run: body(run, None))
    for found in workers(size, lambda run, shares=shares: body(run, shares)):
        assert distance(found, wanted) < 1e-11


def test_local_batchnorm_differs_from_it_and_exchanges_nothing() -> None:
    def body(run: Run, batchnorm: str) -> tuple[Tensor, Tensor, int]:
        model = normed()
        model, opt, loader = run.prepare(model, sgd(model), batches(), batchnorm=batchnorm)
        for x, y in loader:
            advance(model, opt, x, y)
        return parameters(model), model[1].running_mean.clone(), len(run._context.extra_groups)

    first, second = workers(2, lambda run: body(run, "local"))
    assert (
        torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1]) and first[2] == 0
    )
    wanted = alone(lambda run: body(run, "sync"))
    assert distance(first[0], wanted[0]) > 1e-4
    first, second = workers(2, lambda run: body(run, "sync"))
    assert torch.equal(first[1], second[1]) and first[2] == 1


def test_batchnorm_in_evaluation_left_by_break_before_the_next_forward() -> None:
    """The moment that layers ask for is the training one again."""

    def body(run: Run, shares: Any) -> Tensor:
        model = normed()
        model, opt, loader = run.prepare(model, sgd(model), batches(), shares=shares)
        test = run.prepare(batches(8, 3), train=False)
        for x, y in loader:
            with torch.no_grad():
                for u, _ in test:
                    model.eval()(u)
                    break
            model.train()
            advance(model, opt, x, y)
        return parameters(model)

    wanted = alone(lambda run: body(run, None))
    for found in workers(2, lambda run: body(run, [0, 8])):
        assert distance(found, wanted) < 1e-11


def test_batchnorm_after_an_inner_training_loop_left_by_break() -> None:
    def body(run: Run, many: bool) -> Tensor:
        model = normed()
        model, opt, loader = run.prepare(
            model, sgd(model), batches(), shares=[0, 8] if many else None
        )
        other = run.prepare(batches(24, 8), shares=[8, 0] if many else None)
        for x, y in loader:
            for u, v in other:
                advance(model, opt, u, v)
                break
            advance(model, opt, x, y)
        return torch.cat([parameters(model), *(b.reshape(-1).double() for b in model.buffers())])

    wanted = alone(lambda run: body(run, False))
    for found in workers(2, lambda run: body(run, True)):
        assert distance(found, wanted) < 1e-11


# ---- what changes after prepare


@pytest.mark.parametrize("how", ["layer", "assign"])
def test_parameters_that_come_later_are_named_until_they_are_prepared(how: str) -> None:
    def change(model: Any) -> None:
        if how == "layer":
            model.append(fill(nn.Linear(2, 2).double(), 5))
        else:
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    def body(run: Run, again: bool) -> Tensor:
        model = net()
        model, opt, loader = run.prepare(model, sgd(model), batches(40, 8))
        for number, (x, y) in enumerate(loader):
            if number == 1:
                change(model)
                opt = sgd(model)
                if again:
                    model, opt = run.prepare(model, opt)
            advance(model, opt, x, y)
        return parameters(model)

    with pytest.raises(
        UsageError,
        match=r"the parameter [02-9]\.(weight|bias) was added to the model after run\.prepare",
    ):
        workers(2, lambda run: body(run, False))
    wanted = alone(lambda run: body(run, True))
    for found in workers(2, lambda run: body(run, True)):
        assert distance(found, wanted) < 1e-12


def test_replicas_that_part_are_said_at_the_end() -> None:
    said: list[str] = []

    def body(run: Run) -> list[Any]:
        model = run.prepare(net())
        if run.rank == 1:
            with torch.no_grad():
                model[0].bias[0] += 1e-9
        return run.events

    events = workers(3, body, said=said)
    assert [
        text
        for text in said
        if "replicas have parted: the parameters of rank 1 are not those of rank 0" in text
    ]
    assert "parted" in events[0][0]["what"]


@COMPILES
@pytest.mark.filterwarnings("ignore")
def test_a_model_compiled_after_prepare() -> None:
    def body(run: Run, compiled: bool) -> Tensor:
        model = net()
        model, opt, loader = run.prepare(model, sgd(model), batches())
        called = torch.compile(model, backend="eager") if compiled else model
        for x, y in loader:
            advance(called, opt, x, y)
        return parameters(model)

    wanted = alone(lambda run: body(run, False))
    for found in workers(2, lambda run: body(run, True)):
        assert distance(found, wanted) < 1e-12
