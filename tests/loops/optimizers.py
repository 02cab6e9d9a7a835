"""Loops over optimizers and schedules of all kinds, and what people do to them on the way."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.optim import SGD, Adam, AdamW, lr_scheduler

from tests.loops.collection import Samples, batches, filled, loop, mse, net, parts, sgd, train


def stepped_by(name: str, make: Callable[[Any], Any], **known: Any) -> None:
    """A plain loop by this optimizer."""

    def body(run: Any) -> Any:
        model, optimizer, data = parts(run, None, lambda model: make(model.parameters()))
        train(run, model, optimizer, data, 3)
        return model, optimizer

    body.__name__ = f"stepped_by_{name}"
    loop(body, **known)


stepped_by("sgd_nesterov", lambda ps: SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01))
stepped_by("adam", lambda ps: Adam(ps, 0.02))
stepped_by("adam_amsgrad", lambda ps: Adam(ps, 0.02, amsgrad=True))
stepped_by("adam_foreach", lambda ps: Adam(ps, 0.02, foreach=True))
stepped_by("adam_fused", lambda ps: Adam(ps, 0.02, fused=True))
stepped_by(
    "adam_with_a_tensor_for_lr", lambda ps: Adam(ps, torch.tensor(0.02, dtype=torch.float64))
)
stepped_by("adamw", lambda ps: AdamW(ps, 0.02, weight_decay=0.1))
stepped_by("adamax", lambda ps: optim.Adamax(ps, 0.02))
stepped_by("nadam", lambda ps: optim.NAdam(ps, 0.02))
stepped_by("radam", lambda ps: optim.RAdam(ps, 0.02))
stepped_by("rmsprop", lambda ps: optim.RMSprop(ps, 0.01, momentum=0.5, centered=True))
stepped_by("adagrad", lambda ps: optim.Adagrad(ps, 0.05))
stepped_by("adadelta", lambda ps: optim.Adadelta(ps, 1.0))
stepped_by("asgd", lambda ps: optim.ASGD(ps, 0.05, t0=2))
stepped_by("rprop", lambda ps: optim.Rprop(ps, 0.01))
stepped_by("adafactor", lambda ps: optim.Adafactor(ps, 0.02))
stepped_by("sgd_fused", lambda ps: SGD(ps, 0.1, momentum=0.9, fused=True))
stepped_by("sgd_that_ascends", lambda ps: SGD(ps, 0.01, maximize=True))
stepped_by("sgd_too_fast", lambda ps: SGD(ps, 1e200))


@loop
def stepped_by_muon(run: Any) -> Any:
    model = net()
    inner = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    model, one, two, data = run.prepare(
        model, optim.Muon(inner, 0.02), AdamW(others, 0.02), batches()
    )
    for _ in run.epochs(2):
        for x, y in data:
            model.zero_grad()
            mse(model, x, y).backward()
            one.step()
            two.step()
    return model


@loop
def stepped_by_an_optimizer_of_ones_own(run: Any) -> Any:
    class Lion(optim.Optimizer):
        def __init__(self, ps: Any, lr: float) -> None:
            super().__init__(ps, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    held = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.add_((0.9 * held + 0.1 * p.grad).sign(), alpha=-group["lr"])
                    held.lerp_(p.grad, 0.01)

    model, optimizer, data = parts(run, None, lambda model: Lion(model.parameters(), 0.01))
    train(run, model, optimizer, data)
    return model, optimizer


# ---- schedules


def scheduled_by(
    name: str, make: Callable[[Any], Any], *, each: str = "step", **known: Any
) -> None:
    """A plain loop on this schedule, that moves after each step or each epoch."""

    def body(run: Any) -> Any:
        model, optimizer, data = parts(run)
        schedule = run.prepare(make(optimizer))
        rates = []
        for _ in run.epochs(3):
            for x, y in data:
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
                if each == "step":
                    schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
            if each == "epoch":
                schedule.step()
        return model, rates, schedule.get_last_lr(), optimizer

    body.__name__ = f"scheduled_by_{name}"
    loop(body, **known)


scheduled_by("step", lambda o: lr_scheduler.StepLR(o, 1, 0.5), each="epoch")
scheduled_by("milestones", lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3))
scheduled_by("exponential", lambda o: lr_scheduler.ExponentialLR(o, 0.9))
scheduled_by("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, 12))
scheduled_by("warm_restarts", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4))
scheduled_by("one_cycle", lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=12))
scheduled_by("cycle", lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3))
scheduled_by("function", lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)))
scheduled_by("polynomial", lambda o: lr_scheduler.PolynomialLR(o, 12, 0.9))
scheduled_by(
    "warm_up_and_cosine",
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 9)], [3]
    ),
)
scheduled_by(
    "chain",
    lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
)


@loop
def scheduled_by_a_plateau_of_the_mean(run: Any) -> Any:
    model, optimizer, data = parts(run)
    schedule = run.prepare(
        lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.2)
    )
    for _ in run.epochs(4):
        total, count = 0.0, 0.0
        for x, y in data:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            optimizer.step()
            total, count = total + run.mean(loss).item(), count + 1
        schedule.step(total / count)
    return model, optimizer.param_groups[0]["lr"]


@loop(refused="run.mean")
def scheduled_by_a_plateau_of_a_share(run: Any) -> Any:
    model, optimizer, data = parts(run)
    schedule = run.prepare(lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
    for x, y in data:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        schedule.step(loss)
    return model


@loop
def scheduled_before_prepare(run: Any) -> Any:
    model = net()
    optimizer = sgd(model)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.8)
    model, optimizer, data, schedule = run.prepare(model, optimizer, batches(), schedule)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        schedule.step()
    return model, schedule.get_last_lr()


@loop
def scheduled_and_not_prepared(run: Any) -> Any:
    model, optimizer, data = parts(run)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 8)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            schedule.step()
    return model, schedule.get_last_lr()


@loop
def scheduled_over_the_length_of_the_loader(run: Any) -> Any:
    model, optimizer, data = parts(run)
    schedule = run.prepare(
        lr_scheduler.OneCycleLR(optimizer, 0.2, epochs=2, steps_per_epoch=len(data))
    )
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            schedule.step()
    return model, schedule.get_last_lr()


@loop
def rates_set_by_hand(run: Any) -> Any:
    model, optimizer, data = parts(run)
    count = 0
    for _ in run.epochs(2):
        for x, y in data:
            count += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, count / 4)
                group["momentum"] = 0.5
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return model, optimizer


# ---- what people do to optimizers


@loop
def an_optimizers_state_cleared(run: Any) -> Any:
    model, optimizer, data = parts(run, None, lambda model: Adam(model.parameters(), 0.02))
    for _ in run.epochs(2):
        optimizer.state.clear()
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return model, optimizer


@loop
def an_optimizers_state_scaled(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(0.5)
    return model, optimizer


@loop
def an_optimizer_loaded_in_mid_run(run: Any) -> Any:
    model, optimizer, data = parts(run, None, lambda model: Adam(model.parameters(), 0.02))
    train(run, model, optimizer, data, 1)
    kept = copy.deepcopy(optimizer.state_dict())
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
    optimizer.load_state_dict(kept)
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
    return model, optimizer


@loop
def an_optimizer_loaded_from_a_run_before(run: Any) -> Any:
    """After prepare, as scripts do that go on from a file."""
    before = net()
    earlier = Adam(before.parameters(), 0.02)
    mse(before, Samples().x, Samples().y).backward()
    earlier.step()
    model, optimizer, data = parts(run, None, lambda model: Adam(model.parameters(), 0.02))
    model.load_state_dict(before.state_dict())
    optimizer.load_state_dict(earlier.state_dict())
    train(run, model, optimizer, data)
    return model, optimizer


@loop
def an_optimizer_replaced_and_prepared(run: Any) -> Any:
    model, optimizer, data = parts(run)
    train(run, model, optimizer, data, 1)
    optimizer = run.prepare(Adam(model.parameters(), 0.02))
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
    return model, optimizer


@loop
def an_optimizer_replaced_and_not_prepared(run: Any) -> Any:
    model, optimizer, data = parts(run)
    train(run, model, optimizer, data, 1)
    optimizer = Adam(model.parameters(), 0.02)
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
    return model, optimizer


@loop
def an_optimizer_made_each_epoch(run: Any) -> Any:
    model, data = run.prepare(net(), batches())
    for epoch in run.epochs(3):
        optimizer = run.prepare(SGD(model.parameters(), 0.1 / (epoch + 1), momentum=0.9))
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return model


@loop
def an_optimizer_not_prepared(run: Any) -> Any:
    model, data = run.prepare(net(), batches())
    optimizer = Adam(model.parameters(), 0.02)
    train(run, model, optimizer, data)
    return model, optimizer


@loop(said="the SGD steps, and trains nothing")
def an_optimizer_of_another_model(run: Any) -> Any:
    model, other = net(), net()
    model, optimizer, data = run.prepare(model, sgd(other), batches())
    train(run, model, optimizer, data)
    return model


@loop
def a_group_added_of_the_model(run: Any) -> Any:
    """The head first, the rest from the second epoch on."""
    model = net()
    model, optimizer, data = run.prepare(
        model, SGD(model[3].parameters(), 0.1, momentum=0.9), batches()
    )
    for epoch in run.epochs(2):
        if epoch == 1:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        for x, y in data:
            model.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return model, optimizer


@loop(counted=False, refused="prepare")
def a_group_added_of_no_model(run: Any) -> Any:
    model, optimizer, data = parts(run)
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer.add_param_group({"params": [scale]})
    for _ in range(40):
        for x, y in data:
            optimizer.zero_grad()
            mse(lambda x: model(x) * scale, x, y).backward()
            optimizer.step()
    return model, scale


@loop
def parameters_of_no_model(run: Any) -> Any:
    """A learned temperature, in the optimizer alone."""
    model, scale = net(), nn.Parameter(torch.ones((), dtype=torch.float64))
    model, optimizer, data = run.prepare(model, SGD([*model.parameters(), scale], 0.1), batches())
    train(
        run, model, optimizer, data, loss=lambda model, x, y: mse(lambda x: model(x) * scale, x, y)
    )
    return model, scale


@loop
def saved_and_loaded_by_hand(run: Any) -> Any:
    """torch.save of everything, and on in new objects."""
    model, optimizer, data = parts(run, None, lambda model: Adam(model.parameters(), 0.02))
    train(run, model, optimizer, data, 1)
    kept = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    kept.seek(0)
    found = torch.load(kept)
    again = filled(net(), 9)
    again.load_state_dict(found["model"])
    again, other, data = run.prepare(again, Adam(again.parameters(), 0.02), batches())
    other.load_state_dict(found["optimizer"])
    for x, y in data:
        other.zero_grad()
        mse(again, x, y).backward()
        other.step()
    return again, other


@loop
def the_model_pickled_whole(run: Any) -> Any:
    model, optimizer, data = parts(run)
    train(run, model, optimizer, data, 1)
    kept = io.BytesIO()
    torch.save([model, optimizer], kept)
    kept.seek(0)
    again, other = torch.load(kept, weights_only=False)
    return model, again, other
