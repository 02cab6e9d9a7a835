"""Loops that look at how well they do: validation within epochs and between, metrics, logs, and
what runs keep.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.collection import (
    HIDDEN,
    PAIRED,
    Mapped,
    Samples,
    batches,
    draws,
    filled,
    loop,
    mse,
    net,
    parts,
    sgd,
    train,
)


def held() -> Any:
    """Other samples, which no number of workers divides, with a last batch of one."""
    return batches(Samples(11, seed=9), 5, shuffle=False)


def validated(run: Any, model: nn.Module, data: Any) -> float:
    """The mean over all samples, as people sum it up."""
    model.eval()
    total, count = 0.0, 0.0
    with torch.no_grad():
        for x, y in data:
            total += F.mse_loss(model(x), y, reduction="sum").item()
            count += y.numel()
    model.train()
    return float(run.mean(total, 1.0) / run.mean(count, 1.0))


def one_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = mse(model, x, y)
    loss.backward()
    optimizer.step()
    return loss


@loop
def validation_after_each_epoch(run: Any) -> Any:
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    test = run.prepare(held(), train=False)
    found = []
    for _ in run.epochs(2):
        for x, y in data:
            run.log(loss=one_step(model, optimizer, x, y))
        found.append(validated(run, model, test))
    return model, found


@loop
def validation_before_training(run: Any) -> Any:
    model, optimizer, data = parts(run)
    test = run.prepare(held(), train=False)
    found = [validated(run, model, test)]
    train(run, model, optimizer, data)
    return model, [*found, validated(run, model, test)]


@loop
def validation_within_an_epoch(run: Any) -> Any:
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    test = run.prepare(held(), train=False)
    found = []
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data):
            run.log(loss=one_step(model, optimizer, x, y))
            if number % 2:
                found.append(validated(run, model, test))
    return model, found


@loop
def validation_between_backward_and_step(run: Any) -> Any:
    model, optimizer, data = parts(run)
    test = run.prepare(held(), train=False)
    found = []
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        found.append(validated(run, model, test))
        optimizer.step()
    return model, found


@loop
def validation_told_by_no_grad(run: Any) -> Any:
    """No word at prepare: torch.no_grad() around the loop says it."""
    model, optimizer, data = parts(run)
    test = run.prepare(held())
    found = []
    for _ in run.epochs(2):
        for x, y in data:
            run.log(loss=one_step(model, optimizer, x, y))
        found.append(validated(run, model, test))
    return model, found


@loop
def validation_in_inference_mode(run: Any) -> Any:
    model, optimizer, data = parts(run)
    test = run.prepare(held())
    found = []
    for _ in run.epochs(2):
        for x, y in data:
            one_step(model, optimizer, x, y)
        model.eval()
        with torch.inference_mode():
            found.append(torch.cat([run.gather(model(x)) for x, _ in test]).clone())
        model.train()
    return model, found


@loop(counted=True)
def validation_with_no_grad_inside(run: Any) -> Any:
    model, optimizer, data = parts(run)
    test = batches(Samples(11, seed=9), 5, shuffle=False)
    test = run.prepare(test) if run.size > 1 else run.prepare(test, train=False)
    found = []
    for _ in run.epochs(2):
        for x, y in data:
            one_step(model, optimizer, x, y)
        model.eval()
        total, count = 0.0, 0
        for x, y in test:
            with torch.no_grad():
                total += F.mse_loss(model(x), y, reduction="sum").item()
                count += len(x)
        model.train()
        found.append(run.mean(total, 1.0) / run.mean(float(count), 1.0))
    return model, found


@loop
def validation_decorated(run: Any) -> Any:
    @torch.no_grad()
    def evaluate(model: nn.Module, data: Any) -> list[Tensor]:
        return [run.gather(model(x).argmax(1) == y.argmax(1)) for x, y in data]

    model, optimizer, data = parts(run)
    test = run.prepare(held())
    hits = []
    for _ in run.epochs(2):
        for x, y in data:
            one_step(model, optimizer, x, y)
        hits += evaluate(model, test)
    return model, hits


@loop
def validation_on_the_training_data(run: Any) -> Any:
    model, optimizer, data = parts(run)
    found = []
    for _ in run.epochs(2):
        for x, y in data:
            one_step(model, optimizer, x, y)
        found.append(validated(run, model, data))
    return model, found


@loop
def validation_with_gathered_rows(run: Any) -> Any:
    model, optimizer, data = parts(run)
    test = run.prepare(held(), train=False)
    train(run, model, optimizer, data)
    with torch.no_grad():
        rows = [(run.gather(model(x)), run.gather(y)) for x, y in test]
    return model, [torch.cat(part) for part in zip(*rows, strict=True)]


@loop
def validation_with_means_of_batches(run: Any) -> Any:
    model, optimizer, data = parts(run)
    test = run.prepare(held(), train=False)
    train(run, model, optimizer, data)
    with torch.no_grad():
        found = [
            run.mean(F.mse_loss(model(x), y, reduction="sum") / max(y.numel(), 1)) for x, y in test
        ]
    return model, found


@loop
def validation_of_dicts_with_names(run: Any) -> Any:
    model, optimizer, data = parts(run)
    test = run.prepare(
        batches(Mapped(lambda number, x, y: {"x": x, "name": str(number)}, 7), 3, shuffle=False),
        train=False,
    )
    train(run, model, optimizer, data)
    found = []
    with torch.no_grad():
        for batch in test:
            assert len(batch["name"]) == len(batch["x"])
            found.append(run.gather(model(batch["x"])))
    return model, found


@loop
def validation_of_lists(run: Any) -> Any:
    def collate(rows: list[Any]) -> Any:
        return (
            [x for x, _ in rows],
            tuple(f"{float(y[0]):.3f}" for _, y in rows),
            [{"y": y} for _, y in rows],
        )

    model, optimizer, data = parts(run)
    test = run.prepare(
        batches(Samples(11, seed=9), 5, shuffle=False, collate_fn=collate), train=False
    )
    train(run, model, optimizer, data)
    total, count = 0.0, 0.0
    with torch.no_grad():
        for xs, names, targets in test:
            for x, name, target in zip(xs, names, targets, strict=True):
                assert name == f"{float(target['y'][0]):.3f}"
                total += float((model(x) - target["y"]).square().sum())
                count += 1
    return model, run.mean(total, 1.0) / run.mean(count, 1.0)


@loop
def metrics_of_each_step(run: Any) -> Any:
    model, optimizer, data = parts(run)
    found = []
    for _ in run.epochs(2):
        for x, y in data:
            out = model(x)
            loss = F.mse_loss(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = (out.argmax(1) == y.argmax(1)).double().mean()
            found.append((run.mean(right), run.mean(loss), run.mean(loss.item())))
            run.log(loss=loss, right=right, rate=optimizer.param_groups[0]["lr"])
    return model, found


@loop
def predictions_gathered_while_training(run: Any) -> Any:
    model, optimizer, data = parts(run)
    outs = []
    for _ in run.epochs(2):
        for x, y in data:
            out = model(x)
            optimizer.zero_grad()
            F.mse_loss(out, y).backward()
            optimizer.step()
            outs.append((run.gather(out), run.gather(y)))
    return model, outs


@loop
def logging_now_and_then(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for epoch in run.epochs(2):
        for number, (x, y) in enumerate(data):
            loss = one_step(model, optimizer, x, y)
            if number % 2 == 0:
                run.log(loss=loss.detach(), epoch=epoch, lr=optimizer.param_groups[0]["lr"])
                run.print(f"step {number} of epoch {epoch}: {loss.item():.3f}")
    return model


@loop
def a_running_mean_of_losses(run: Any) -> Any:
    """By samples, which each worker adds up for itself, brought together at the end of the
    epoch.
    """
    model, optimizer, data = parts(run)
    means = []
    for _ in run.epochs(2):
        total = torch.zeros((), dtype=torch.float64)
        for x, y in data:
            loss = one_step(model, optimizer, x, y)
            total += run.mean(loss.detach())
        means.append(total / len(data))
    return model, means


@loop
def evaluation_mode_inside_training(run: Any) -> Any:
    """A forward in eval mode for a target, and one in train mode to learn."""
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    for _ in run.epochs(2):
        for x, y in data:
            model.eval()
            with torch.no_grad():
                aim = model(x.flip(1))
            model.train()
            optimizer.zero_grad()
            (mse(model, x, y) + 0.1 * F.mse_loss(model(x), aim)).backward()
            optimizer.step()
    return model


@loop
def random_numbers_by_the_seed_of_the_run(run: Any) -> Any:
    """The same mask on every worker."""
    model, optimizer, data = parts(run)
    numbers = draws(run.seed)
    for _ in run.epochs(2):
        for x, y in data:
            mask = (torch.rand(x.shape[1], generator=numbers) > 0.3).double()
            one_step(model, optimizer, x * mask, y)
    return model


@loop
def noise_that_belongs_to_samples(run: Any) -> Any:
    """Augmentation in the data set, seeded by the sample's number."""

    def noisy(number: int, x: Tensor, y: Tensor) -> Any:
        return x + 0.1 * torch.randn(x.shape, generator=draws(number), dtype=x.dtype), y

    model = net()
    model, optimizer, data = run.prepare(model, sgd(model), batches(Mapped(noisy)))
    train(run, model, optimizer, data)
    return model


@loop
def everything_prepared_one_by_one(run: Any) -> Any:
    model = run.prepare(net())
    optimizer = run.prepare(sgd(model))
    data = run.prepare(batches())
    train(run, model, optimizer, data)
    return model, optimizer


@loop
def prepared_in_another_order(run: Any) -> Any:
    model = net()
    data, optimizer, model = run.prepare(batches(), sgd(model), model)
    train(run, model, optimizer, data)
    return model


@loop
def a_loop_over_epochs_by_range(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for epoch in range(3):
        for x, y in data:
            run.log(loss=one_step(model, optimizer, x, y), epoch=epoch)
    return model


@loop
def phases_as_in_the_tutorial(run: Any) -> Any:
    """One loop for both phases, with set_grad_enabled in its middle, and loaders in a dict."""
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    loaders = {"train": data, "val": run.prepare(held(), train=False)}
    found = []
    for _ in run.epochs(2):
        for phase, loader in loaders.items():
            model.train(phase == "train")
            total = 0.0
            for x, y in loader:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    loss = mse(model, x, y)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                total += loss.item() * len(x) if run.weight else 0.0
            found.append(run.mean(total, 1.0) * run.size)
    return model, found


@loop(counted=False, said="prepare")
def nothing_prepared(run: Any) -> Any:
    model = net()
    train(run, model, sgd(model), batches())
    return model


@loop(counted=False, said="loader")
def no_loader_prepared(run: Any) -> Any:
    """Every worker has the whole of each batch: right, and no quicker."""
    model = net()
    model, optimizer = run.prepare(model, sgd(model))
    train(run, model, optimizer, batches())
    return model


@loop(refused="DataParallel")
def wrapped_in_data_parallel(run: Any) -> Any:
    model = net()
    if run.size > 1:
        model = nn.DataParallel(model)
    model, optimizer, data = run.prepare(model, sgd(model), batches())
    train(run, model, optimizer, data)
    return model


@loop(counted=False, refused="not initialised")
def a_lazy_model(run: Any) -> Any:
    model = nn.Sequential(nn.LazyLinear(HIDDEN), nn.Linear(HIDDEN, 2)).double()
    if run.size == 1:
        model(Samples().x)
    model = run.prepare(model)
    return []


@loop
def a_lazy_model_run_before(run: Any) -> Any:
    model = nn.Sequential(nn.LazyLinear(HIDDEN), nn.Linear(HIDDEN, 2)).double()
    with torch.no_grad():
        model(Samples().x[:1])
    model = filled(model)
    model, optimizer, data = run.prepare(model, sgd(model), batches())
    train(run, model, optimizer, data)
    return model
