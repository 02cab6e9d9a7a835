"""Loops of projects rather than tutorials: stages, folds, curricula, swaps of weights, losses
over several batches, state in buffers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Subset

from tests.loops.collection import (
    COUNT,
    HIDDEN,
    OUT,
    PAIRED,
    WIDTH,
    Mapped,
    Samples,
    batches,
    filled,
    loop,
    mse,
    net,
    parts,
    sgd,
    train,
)


def one_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = mse(model, x, y)
    loss.backward()
    optimizer.step()
    return loss


# ---- stages


@loop
def two_stages_of_epochs(run: Any) -> Any:
    """The head alone, then everything, each with epochs of its own."""
    model = net()
    model[0].requires_grad_(False)
    model, optimizer, data = run.prepare(model, sgd(model), batches())
    seen = []
    for epoch in run.epochs(2):
        seen.append(epoch)
        for x, y in data:
            one_step(model, optimizer, x, y)
    model[0].requires_grad_(True)
    optimizer = run.prepare(sgd(model, 0.02))
    for epoch in run.epochs(2):
        seen.append(epoch)
        for x, y in data:
            one_step(model, optimizer, x, y)
    return model, seen


@loop
def folds(run: Any) -> Any:
    """Cross-validation: a model, an optimizer and loaders for each."""
    found = []
    for fold in range(3):
        inside = [n for n in range(COUNT) if n % 3 != fold]
        outside = [n for n in range(COUNT) if n % 3 == fold]
        model = net(seed=fold)
        model, optimizer, data = run.prepare(model, sgd(model), batches(Subset(Samples(), inside)))
        test = run.prepare(batches(Subset(Samples(), outside), shuffle=False), train=False)
        for _ in range(2):
            for x, y in data:
                one_step(model, optimizer, x, y)
        with torch.no_grad():
            found.append(torch.cat([run.gather(model(x)) for x, _ in test]))
    return found


@loop
def a_loader_made_each_epoch(run: Any) -> Any:
    """A curriculum: harder samples come in later."""
    model, optimizer, _ = parts(run)
    for epoch in range(3):
        data = run.prepare(batches(Subset(Samples(), range(7 + 6 * epoch)), 4))
        for x, y in data:
            one_step(model, optimizer, x, y)
    return model


@loop(counted=False)
def so_many_steps(run: Any) -> Any:
    """While there are steps to take, over and over the data, out of two loops at once."""
    model, optimizer, data = parts(run)
    step, done = 0, False
    while not done:
        for x, y in data:
            one_step(model, optimizer, x, y)
            step += 1
            if step == 10:
                done = True
                break
    return model, step


@loop
def a_search_for_a_rate(run: Any) -> Any:
    """Some steps at growing rates, and all put back."""
    model, optimizer, data = parts(run)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses = []
    for number, (x, y) in enumerate(data):
        optimizer.param_groups[0]["lr"] = 0.001 * 3**number
        losses.append(run.mean(one_step(model, optimizer, x, y)))
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    train(run, model, optimizer, data, 1)
    return model, optimizer, losses


@loop
def an_error_that_all_catch(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data):
            try:
                optimizer.zero_grad()
                loss = mse(model, x, y)
                if number == 1:
                    raise RuntimeError("out of memory")
                loss.backward()
                optimizer.step()
            except RuntimeError:
                optimizer.zero_grad()
    return model


@loop
def an_error_between_backward_and_step_that_all_catch(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data):
            try:
                optimizer.zero_grad()
                mse(model, x, y).backward()
                if number == 1:
                    raise RuntimeError("out of memory")
                optimizer.step()
            except RuntimeError:
                continue
    return model


@loop(refused="one position")
def a_loop_inside_the_same_loader(run: Any) -> Any:
    """A data loader has any number of iterators, ours one."""
    model, optimizer, data = parts(run)
    for x, y in data:
        one_step(model, optimizer, x, y)
        with torch.no_grad():
            sum(float(mse(model, a, b)) for a, b in data)
    return model


# ---- losses


@loop(counted=False, refused="one loss of several batches")
def a_loss_of_several_batches(run: Any) -> Any:
    """One backward for every two batches."""
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        total: Any = 0.0
        for number, (x, y) in enumerate(data, 1):
            total = total + mse(model, x, y) / 2
            if number % 2 == 0:
                optimizer.zero_grad()
                total.backward()
                optimizer.step()
                total = 0.0
    return model


@loop(counted=False, refused="one loss of several batches")
def a_loss_of_the_whole_epoch(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        optimizer.zero_grad()
        total: Any = 0.0
        for x, y in data:
            total = total + mse(model, x, y) / len(data)
        total.backward()
        optimizer.step()
    return model


@loop
def a_loss_of_several_batches_of_equal_shares(run: Any) -> Any:
    """Nothing is wrong with that where each worker has the same part of all of them, with two
    workers or three.
    """
    model = net()
    model, optimizer, data = run.prepare(model, sgd(model), batches(drop_last=True))
    for _ in run.epochs(2):
        total: Any = 0.0
        for number, (x, y) in enumerate(data, 1):
            total = total + mse(model, x, y) / 2
            if number % 2 == 0:
                optimizer.zero_grad()
                total.backward()
                optimizer.step()
                total = 0.0
    return model


@loop
def class_weights(run: Any) -> Any:
    """A weighted mean is weighed."""
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    model, loss_of = net(3), nn.CrossEntropyLoss(weight=weights)
    data = batches(Mapped(lambda number, x, y: (x, number % 3)))
    model, optimizer, data = run.prepare(
        model, sgd(model), data, weigh=lambda batch: float(weights[batch[1]].sum())
    )
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    return model


@loop
def losses_of_many_kinds(run: Any) -> Any:
    model, optimizer, data = parts(run)
    kinds = [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
    ]
    kinds += [
        F.binary_cross_entropy_with_logits,
        lambda a, b: F.cross_entropy(a, b.softmax(1), label_smoothing=0.1),
        F.soft_margin_loss,
    ]
    kinds += [
        lambda a, b: F.gaussian_nll_loss(a, b, torch.ones_like(a)),
        lambda a, b: F.nll_loss(a.log_softmax(1), b.argmax(1)),
    ]
    for epoch in run.epochs(3):
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            kinds[(number + 4 * epoch) % len(kinds)](model(x), y.sigmoid()).backward()
            optimizer.step()
    return model


@loop
def an_attack_on_weights(run: Any) -> Any:
    """FGM: a second backward at moved embeddings adds to the first."""
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            held = model[0].weight.data.clone()
            model[0].weight.data.add_(0.1 * model[0].weight.grad / model[0].weight.grad.norm())
            mse(model, x, y).backward()
            model[0].weight.data = held
            optimizer.step()
    return model


@loop
def weights_of_losses_that_are_learned(run: Any) -> Any:
    model, scales = net(), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model, optimizer, data = run.prepare(
        model,
        Adam([{"params": model.parameters()}, {"params": [scales], "lr": 0.1}], 0.02),
        batches(),
    )
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            out = model(x)
            each = torch.stack([F.mse_loss(out[:, 0], y[:, 0]), F.l1_loss(out[:, 1], y[:, 1])])
            ((-scales).exp() * each + scales).sum().backward()
            optimizer.step()
    return model, scales


@loop
def backward_to_some_inputs(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward(inputs=list(model[3].parameters()))
            optimizer.step()
    return model


@loop
def gradients_changed_in_a_hook_that_accumulates(run: Any) -> Any:
    """Registered before prepare it sees the share's gradient, and what it makes of it is
    exchanged: halving is linear.
    """
    model = net()

    def halve(p: Tensor) -> None:
        p.grad = p.grad * 0.5

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    model, optimizer, data = parts(run, model)
    train(run, model, optimizer, data)
    return model


@loop(refused="create_graph")
def a_penalty_through_batch_norm(run: Any) -> Any:
    """autograd.grad with a graph, through statistics of all workers."""
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            x = x.clone().requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (F.mse_loss(out, y) + 0.1 * slope.square().sum(1).mean()).backward()
            optimizer.step()
    return model


@loop
def an_attack_through_batch_norm(run: Any) -> Any:
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    for _ in run.epochs(2):
        for x, y in data:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(F.mse_loss(model(x), y, reduction="sum"), x)
            one_step(model, optimizer, (x + 0.1 * slope.sign()).detach(), y)
    return model


@loop
def two_batch_norms_and_two_forwards(run: Any) -> Any:
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            (mse(model, x, y) + F.mse_loss(model(x.flip(1)), y)).backward()
            optimizer.step()
    return model


@loop
def statistics_of_batch_norm_taken_again(run: Any) -> Any:
    """A pass in train mode without gradients, over the prepared loader."""
    model, optimizer, data = parts(
        run, net(middle=nn.BatchNorm1d(HIDDEN, momentum=None)), count=PAIRED
    )
    train(run, model, optimizer, data, 1)
    model[1].reset_running_stats()
    model.train()
    with torch.no_grad():
        for x, _ in data:
            model(x)
    return model


# ---- state


@loop
def weights_swapped_for_their_average(run: Any) -> Any:
    """As EMA classes do: `data` of parameters goes to and fro."""
    model, optimizer, data = parts(run)
    shadow = [p.data.clone() for p in model.parameters()]
    test = run.prepare(batches(Samples(7, seed=9), 4, shuffle=False), train=False)
    found = []
    for _ in run.epochs(2):
        for x, y in data:
            one_step(model, optimizer, x, y)
            for s, p in zip(shadow, model.parameters(), strict=True):
                s.mul_(0.8).add_(p.data, alpha=0.2)
        held = [p.data for p in model.parameters()]
        for s, p in zip(shadow, model.parameters(), strict=True):
            p.data = s
        with torch.no_grad():
            found.append(torch.cat([run.gather(model(x)) for x, _ in test]))
        for h, p in zip(held, model.parameters(), strict=True):
            p.data = h
    return model, found


@loop
def weights_as_a_vector(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            one_step(model, optimizer, x, y)
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 0.99, model.parameters())
    return model


@loop(refused="the like before run.prepare")
def cast_after_prepare(run: Any) -> Any:
    model, optimizer, data = parts(run, net().float())
    model.double()
    train(run, model, optimizer, data)
    return model


@loop
def cast_before_prepare(run: Any) -> Any:
    model = net().float()
    model.double()
    model, optimizer, data = run.prepare(model, sgd(model), batches())
    train(run, model, optimizer, data)
    return model


@loop
def parts_of_one_model_in_two(run: Any) -> Any:
    trunk = filled(nn.Linear(WIDTH, HIDDEN))
    one, two = (
        nn.Sequential(trunk, filled(nn.Linear(HIDDEN, OUT), 6)),
        nn.Sequential(trunk, filled(nn.Linear(HIDDEN, OUT), 7)),
    )
    optimizer = SGD({id(p): p for p in [*one.parameters(), *two.parameters()]}.values(), 0.05)
    one, two, optimizer, data = run.prepare(one, two, optimizer, batches())
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            (mse(one, x, y) + mse(two, x, -y)).backward()
            optimizer.step()
    return one, two


class Queue(nn.Module):
    """Keeps the newest samples, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, OUT)
        self.register_buffer("queue", torch.zeros(4, OUT))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.training:
            self.queue = torch.cat([out.detach(), self.queue])[:4]
        return out


@loop(said="the buffer queue differs between workers")
def buffers_of_samples(run: Any) -> Any:
    model, optimizer, data = parts(run, filled(Queue()))
    train(run, model, optimizer, data)
    return model.inner


@loop
def the_mean_of_an_empty_share(run: Any) -> Any:
    """A mean over no samples is no number, and counts for nothing."""
    model, optimizer, data = parts(run)
    test = run.prepare(batches(Samples(7, seed=9), 6, shuffle=False), train=False)
    train(run, model, optimizer, data)
    found = []
    with torch.no_grad():
        for x, y in test:
            loss = mse(model, x, y)
            found.append((run.mean(loss), run.mean(loss.item())))
    return model, found


# ---- the process's random numbers


@loop(threads="threads share the process's random generator")
def shuffled_by_the_process(run: Any) -> Any:
    torch.manual_seed(11)
    model, optimizer, data = parts(run)
    data = run.prepare(DataLoader(Samples(), 6, shuffle=True))
    for _ in run.epochs(3):
        for x, y in data:
            one_step(model, optimizer, x, y)
    return model, float(torch.rand(()))


@loop(threads="threads share the process's random generator")
def shuffled_by_the_process_with_readers(run: Any) -> Any:
    torch.manual_seed(11)
    model, optimizer, data = parts(run)
    data = run.prepare(DataLoader(Samples(), 6, shuffle=True, num_workers=1))
    for _ in run.epochs(2):
        for x, y in data:
            one_step(model, optimizer, x, y)
    return model, float(torch.rand(()))


@loop(threads="threads share the process's default dtype")
def in_a_default_dtype(run: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        model, optimizer, data = parts(run, None, lambda model: Adam(model.parameters(), 0.02))
        train(run, model, optimizer, data)
        return model, optimizer
    finally:
        torch.set_default_dtype(torch.float32)
