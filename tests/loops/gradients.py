"""Loops that do something with gradients between a backward and a step."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam

from tests.loops.collection import HIDDEN, WIDTH, batches, filled, loop, mse, net, parts, sgd, train

# ---- clipping


@loop
def the_plainest_loop(run: Any) -> Any:
    model, optimizer, data = parts(run)
    train(run, model, optimizer, data, 3)
    return model, optimizer


@loop
def clipping_by_norm(run: Any) -> Any:
    model, optimizer, data = parts(run)
    norms = []
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
    return model, optimizer, norms


@loop
def clipping_by_value(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
    return model


@loop
def clipping_by_the_runs_own(run: Any) -> Any:
    model, optimizer, data = parts(run)
    norms = []
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            norms.append(run.clip(model, 0.3, math.inf))
            optimizer.step()
    return model, norms


@loop
def clipping_groups_apart(run: Any) -> Any:
    model = net()
    groups = [
        {"params": model[0].parameters(), "lr": 0.05},
        {"params": model[3].parameters(), "weight_decay": 0.01},
    ]
    model, optimizer, data = run.prepare(model, SGD(groups, lr=0.1, momentum=0.9), batches())
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            for number, group in enumerate(optimizer.param_groups):
                nn.utils.clip_grad_norm_(group["params"], 0.1 * (number + 1))
            optimizer.step()
    return model, optimizer


@loop
def adaptive_clipping(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    limit = 0.1 * p.norm().clamp(min=1e-3)
                    p.grad.mul_((limit / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))
            optimizer.step()
    return model


@loop
def norms_of_foreach(run: Any) -> Any:
    model, optimizer, data = parts(run)
    norms = []
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.2, norms[-1], foreach=True)
        optimizer.step()
    return model, norms


# ---- accumulation


@loop
def accumulation_by_hand(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data):
            (mse(model, x, y) / 2).backward()
            if number % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer


@loop
def accumulation_with_the_remainder(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data, 1):
            (mse(model, x, y) / 3).backward()
            if number % 3 == 0 or number == len(data):
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer


@loop
def accumulation_without_exchange(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data, 1):
            last = number % 3 == 0 or number == len(data)
            with contextlib.nullcontext() if last else run.no_sync():
                (mse(model, x, y) / 3).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer


@loop
def accumulation_over_epochs(run: Any) -> Any:
    model, optimizer, data = parts(run)
    count = 0
    for _ in run.epochs(3):
        for x, y in data:
            count += 1
            (mse(model, x, y) / 5).backward()
            if count % 5 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model, [p.grad for p in model.parameters()]


# ---- several losses, several backwards


@loop
def two_losses_backward_apart(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            out = model(x)
            F.mse_loss(out, y).backward(retain_graph=True)
            (0.1 * out.abs().mean()).backward()
            optimizer.step()
    return model


@loop
def two_tasks_with_heads(run: Any) -> Any:
    trunk, one, two = (
        filled(nn.Linear(*shape), seed)
        for seed, shape in enumerate([(WIDTH, HIDDEN), (HIDDEN, 1), (HIDDEN, 1)])
    )
    optimizer = Adam([*trunk.parameters(), *one.parameters(), *two.parameters()], 0.02)
    trunk, one, two, optimizer, data = run.prepare(trunk, one, two, optimizer, batches())
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            middle = trunk(x).tanh()
            loss = F.mse_loss(one(middle), y[:, :1]) + 0.3 * F.l1_loss(two(middle), y[:, 1:])
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    return trunk, one, two, optimizer


@loop
def alternating_tasks(run: Any) -> Any:
    """Each step leaves one head without a gradient."""
    trunk = filled(nn.Linear(WIDTH, HIDDEN))
    heads = filled(nn.ModuleList([nn.Linear(HIDDEN, 1), nn.Linear(HIDDEN, 1)]), 6)
    optimizer = Adam([*trunk.parameters(), *heads.parameters()], 0.02, weight_decay=0.1)
    trunk, heads, optimizer, data = run.prepare(trunk, heads, optimizer, batches())
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            F.mse_loss(heads[number % 2](trunk(x).tanh()), y[:, :1]).backward()
            optimizer.step()
    return trunk, heads, optimizer


@loop
def losses_in_a_list(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            out = model(x)
            losses = [F.mse_loss(out[:, 0], y[:, 0]), F.l1_loss(out[:, 1], y[:, 1])]
            torch.autograd.backward(losses)
            optimizer.step()
    return model


@loop
def a_loss_that_is_a_vector(run: Any) -> Any:
    """Each sample's loss, with a weight of its own given to backward; the loss is a sum."""
    model, optimizer, data = parts(run, loss="sum")
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            each = (model(x) - y).square().mean(1)
            each.backward(0.1 * y[:, 0].abs())
            optimizer.step()
    return model


@loop
def a_sum_over_samples(run: Any) -> Any:
    model, optimizer, data = parts(run, loss="sum")
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            (0.05 * F.mse_loss(model(x), y, reduction="sum")).backward()
            optimizer.step()
    return model


@loop
def a_sum_divided_by_the_batch_size(run: Any) -> Any:
    """The batch size of the script is that of all workers, the last batch's too."""
    model, optimizer, data = parts(run, loss="sum")
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            (F.mse_loss(model(x), y, reduction="sum") / data.batch_size).backward()
            optimizer.step()
    return model


@loop
def a_sum_said_before_the_loader(run: Any) -> Any:
    model = net()
    model, optimizer = run.prepare(model, sgd(model), loss="sum")
    data = run.prepare(batches())
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            (0.05 * F.mse_loss(model(x), y, reduction="sum")).backward()
            optimizer.step()
    return model


@loop
def a_loss_divided_by_the_length_of_the_loader(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        optimizer.zero_grad()
        for x, y in data:
            loss = mse(model, x, y) / len(data)
            loss.backward()
        optimizer.step()
    return model


@loop
def weights_by_tokens(run: Any) -> Any:
    model = net()
    weigh = lambda batch: float((batch[1][:, 0] > 0.8).sum())  # noqa: E731
    model, optimizer, data = run.prepare(model, sgd(model), batches(), weigh=weigh)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            kept = y[:, 0] > 0.8
            if not (math.isfinite(float(kept.sum())) and run.mean(float(kept.sum()), 1.0)):
                continue
            loss = ((model(x) - y).square().mean(1) * kept).sum() / kept.sum().clamp(min=1)
            loss.backward()
            optimizer.step()
    return model


# ---- gradients of gradients


@loop
def a_gradient_penalty(run: Any) -> Any:
    """On inputs, with a graph, as in WGAN-GP."""
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            x = x.clone().requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = F.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    return model


@loop
def the_norm_of_a_gradient_in_the_loss(run: Any) -> Any:
    """Of parameters, by share: each worker differentiates its own loss, so the loss isn't a mean
    over samples. One sample's is.
    """
    model = net()
    model, optimizer, data = run.prepare(model, sgd(model), batches(batch=1))
    for x, y in data:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.01 * sum(g.square().sum() for g in found)).backward()
        optimizer.step()
    return model


@loop(refused="create_graph")
def a_backward_that_keeps_a_graph(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for x, y in data:
        optimizer.zero_grad()
        loss = mse(model, x, y)
        loss.backward(create_graph=True)
        sum(p.grad.square().sum() for p in model.parameters()).backward()
        optimizer.step()
    return model


@loop(refused="p.grad of 0.weight was set by the script")
def gradients_set_by_hand(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for x, y in data:
        found = torch.autograd.grad(mse(model, x, y), list(model.parameters()))
        for p, g in zip(model.parameters(), found, strict=True):
            p.grad = g
        optimizer.step()
    return model


@loop
def gradients_set_by_hand_to_their_mean(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for x, y in data:
        found = torch.autograd.grad(mse(model, x, y), list(model.parameters()))
        for p, g in zip(model.parameters(), found, strict=True):
            p.grad = run.mean(g)
        optimizer.step()
    return model


@loop
def first_order_maml(run: Any) -> Any:
    """An inner step on a functional copy; the outer loss goes through it.

    One sample a step: the inner step is of a share.
    """
    model = net()
    model, optimizer, data = run.prepare(model, sgd(model), batches(batch=1))
    for x, y in data:
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
        found = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: p - 0.05 * g for (name, p), g in zip(weights.items(), found, strict=True)}
        F.mse_loss(torch.func.functional_call(model, moved, (x,)), y).backward()
        optimizer.step()
    return model


@loop
def gradients_of_the_input(run: Any) -> Any:
    """Training on what an attack makes of each sample (FGSM)."""
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            x = x.clone().requires_grad_()
            (found,) = torch.autograd.grad(F.mse_loss(model(x), y, reduction="sum"), x)
            optimizer.zero_grad()
            mse(model, (x + 0.05 * found.sign()).detach(), y).backward()
            optimizer.step()
    return model


@loop
def an_attack_by_backward(run: Any) -> Any:
    """As above, with backward: the model's gradients of the attack are thrown away."""
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            x = x.clone().requires_grad_()
            F.mse_loss(model(x), y, reduction="sum").backward()
            optimizer.zero_grad()
            mse(model, (x + 0.05 * x.grad.sign()).detach(), y).backward()
            optimizer.step()
    return model
