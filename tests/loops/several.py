"""Loops that change gradients by hand, step several times, or keep what was."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

from tests.loops.collection import (
    HIDDEN,
    OUT,
    WIDTH,
    batches,
    draws,
    filled,
    loop,
    mse,
    net,
    parts,
    sgd,
)


def flat_grads(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


@loop
def pcgrad(run: Any) -> Any:
    """Gradients of two tasks, each without what contradicts the other."""
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            kept = []
            for task in range(OUT):
                optimizer.zero_grad()
                F.mse_loss(model(x)[:, task], y[:, task]).backward()
                kept.append([p.grad for p in model.parameters()])
            for n, p in enumerate(model.parameters()):
                a, b = kept[0][n], kept[1][n]
                dot = (a * b).sum()
                p.grad = a + b - torch.where(dot < 0, dot / b.square().sum() * b, 0.0)
            optimizer.step()
    return model


@loop
def cosines_between_steps(run: Any) -> Any:
    model, optimizer, data = parts(run)
    before, cosines = None, []
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            now = [p.grad for p in model.parameters()]
            if before is not None:
                cosines.append(
                    sum(
                        F.cosine_similarity(a.view(-1), b.view(-1), dim=0)
                        for a, b in zip(now, before, strict=True)
                    )
                )
            before = now
            optimizer.step()
    return model, cosines


@loop
def views_of_gradients_kept(run: Any) -> Any:
    model, optimizer, data = parts(run)
    rows = []
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        rows.append([model[0].weight.grad[0], model[3].bias.grad.detach().view(-1)])
        optimizer.step()
    return model, rows


@loop
def gradients_cloned(run: Any) -> Any:
    model, optimizer, data = parts(run)
    kept = []
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        kept.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return model, kept


@loop
def gradients_seen_and_zeroed_in_place(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
            mse(model, x, y).backward()
            optimizer.step()
    return model, flat_grads(model)


@loop
def gradients_set_to_none_by_hand(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            for p in model.parameters():
                p.grad = None
            mse(model, x, y).backward()
            optimizer.step()
    return model, flat_grads(model)


@loop
def zero_grad_that_keeps_tensors(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad(set_to_none=False)
            mse(model, x, y).backward()
            optimizer.step()
    return model, flat_grads(model)


@loop
def zero_grad_after_the_step_by_the_model(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            mse(model, x, y).backward()
            optimizer.step()
            model.zero_grad()
    return model


@loop
def zero_grad_of_now_and_then(run: Any) -> Any:
    """Gradients pile up over two steps, with a step after each."""
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data):
            mse(model, x, y).backward()
            optimizer.step()
            if number % 2:
                optimizer.zero_grad(set_to_none=number % 3 == 0)
    return model


@loop
def zero_grad_between_forward_and_backward(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            loss = mse(model, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


@loop
def noise_on_gradients(run: Any) -> Any:
    model, optimizer, data = parts(run)
    numbers = draws(9)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            for p in model.parameters():
                p.grad.add_(torch.randn(p.shape, generator=numbers, dtype=p.dtype), alpha=0.01)
            optimizer.step()
    return model


@loop
def centralised_gradients(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            for p in model.parameters():
                if p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
            optimizer.step()
    return model


@loop
def gradients_replaced_by_their_signs(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            for p in model.parameters():
                p.grad = p.grad.sign() * 0.1
            optimizer.step()
    return model


@loop
def gradients_through_data(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            for p in model.parameters():
                p.grad.data = p.grad.data * 0.5
            optimizer.step()
    return model


@loop
def weight_decay_by_hand(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            for p in model.parameters():
                p.grad.add_(p.detach(), alpha=0.05)
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99)
    return model


@loop
def a_penalty_in_the_loss(run: Any) -> Any:
    """The same for each share: its weighted mean is itself."""
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            loss = mse(model, x, y) + 0.02 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    return model


@loop
def a_penalty_backward_apart(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            (0.02 * sum(p.square().sum() for p in model.parameters())).backward()
            optimizer.step()
    return model


@loop
def steps_without_an_optimizer(run: Any) -> Any:
    model, data = run.prepare(net(), batches())
    for _ in run.epochs(2):
        for x, y in data:
            model.zero_grad()
            mse(model, x, y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    return model


@loop
def sharpness_aware(run: Any) -> Any:
    """SAM: up, again forward and backward, back, and step."""
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            norm = flat_grads(model).norm()
            moved = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            with torch.no_grad():
                for p, m in zip(model.parameters(), moved, strict=True):
                    p.add_(m)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            with torch.no_grad():
                for p, m in zip(model.parameters(), moved, strict=True):
                    p.sub_(m)
            optimizer.step()
    return model


@loop
def sharpness_aware_by_a_closure(run: Any) -> Any:
    class Sam(torch.optim.Optimizer):
        def __init__(self, params: Any, rho: float = 0.05) -> None:
            super().__init__(params, {"rho": rho})
            self.base = SGD(self.param_groups, 0.1)

        def step(self, closure: Any = None) -> Any:
            ps = [p for group in self.param_groups for p in group["params"]]
            norm = torch.cat([p.grad.reshape(-1) for p in ps]).norm()
            old = [p.detach().clone() for p in ps]
            with torch.no_grad():
                for p in ps:
                    p.add_(p.grad, alpha=float(0.05 / norm))
            with torch.enable_grad():
                closure()
            with torch.no_grad():
                for p, o in zip(ps, old, strict=True):
                    p.copy_(o)
            self.base.step()

    model, optimizer, data = parts(run, None, lambda model: Sam(model.parameters()))
    for _ in run.epochs(2):
        for x, y in data:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = mse(model, x, y)
                loss.backward()
                return loss

            closure()
            optimizer.step(closure)
    return model


@loop
def lookahead(run: Any) -> Any:
    model, optimizer, data = parts(run)
    slow = [p.detach().clone() for p in model.parameters()]
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data, 1):
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            if number % 2 == 0:
                with torch.no_grad():
                    for s, p in zip(slow, model.parameters(), strict=True):
                        s.lerp_(p, 0.5)
                        p.copy_(s)
    return model


@loop
def svrg(run: Any) -> Any:
    """Variance reduced by a snapshot's gradients, of the whole data and of each batch."""
    model, optimizer, data = parts(run)
    snapshot = run.prepare(copy.deepcopy(model))
    for _ in run.epochs(2):
        snapshot.load_state_dict(model.state_dict())
        snapshot.zero_grad()
        for x, y in data:
            (mse(snapshot, x, y) / len(data)).backward()
        whole = [p.grad for p in snapshot.parameters()]
        for x, y in data:
            snapshot.zero_grad()
            optimizer.zero_grad()
            mse(snapshot, x, y).backward()
            mse(model, x, y).backward()
            for p, s, g in zip(model.parameters(), snapshot.parameters(), whole, strict=True):
                p.grad += g - s.grad
            optimizer.step()
    return model


@loop
def a_closure(run: Any) -> Any:
    model, optimizer, data = parts(run)
    losses = []
    for _ in run.epochs(2):
        for x, y in data:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = mse(model, x, y)
                loss.backward()
                return loss

            losses.append(run.mean(optimizer.step(closure)))
    return model, losses


@loop(refused="LBFGS")
def lbfgs(run: Any) -> Any:
    model, optimizer, data = parts(run, None, lambda model: torch.optim.LBFGS(model.parameters()))
    for x, y in data:
        optimizer.step(lambda x=x, y=y: mse(model, x, y))
    return model


@loop
def two_steps_on_each_batch(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            for _ in range(2):
                optimizer.zero_grad()
                mse(model, x, y).backward()
                optimizer.step()
    return model, optimizer


@loop
def two_steps_on_one_gradient(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.step()
    return model, optimizer


@loop
def a_gan(run: Any) -> Any:
    maker, critic = (
        net(WIDTH, 5),
        filled(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)), 6),
    )
    making, judging = (
        Adam(maker.parameters(), 0.02, betas=(0.5, 0.9)),
        Adam(critic.parameters(), 0.02),
    )
    maker, critic, making, judging, data = run.prepare(maker, critic, making, judging, batches())
    for _ in run.epochs(2):
        for x, y in data:
            noise = torch.cat([y, y, y[:, :1]], 1)
            judging.zero_grad()
            real = F.softplus(-critic(x)).mean()
            real.backward()
            made = F.softplus(critic(maker(noise).detach())).mean()
            made.backward()
            judging.step()
            making.zero_grad()
            loss = F.softplus(-critic(maker(noise))).mean()
            loss.backward()
            making.step()
            run.log(maker=loss, critic=real + made)
    return maker, critic, making, judging


@loop
def a_gan_that_makes_first(run: Any) -> Any:
    """The critic has gradients of the maker's loss, too, which are cleared before its own."""
    maker, critic = (
        net(WIDTH, 5),
        filled(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)), 6),
    )
    making, judging = sgd(maker, 0.05), sgd(critic, 0.05)
    maker, critic, making, judging, data = run.prepare(maker, critic, making, judging, batches())
    for _ in run.epochs(2):
        for x, y in data:
            noise = torch.cat([y, y, y[:, :1]], 1)
            making.zero_grad()
            fake = maker(noise)
            F.softplus(-critic(fake)).mean().backward()
            making.step()
            judging.zero_grad()
            (F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
            judging.step()
    return maker, critic, making, judging


@loop
def a_critic_five_times(run: Any) -> Any:
    maker, critic = (
        net(WIDTH, 5),
        filled(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)), 6),
    )
    making, judging = sgd(maker, 0.05), sgd(critic, 0.05)
    maker, critic, making, judging, data = run.prepare(maker, critic, making, judging, batches())
    for _ in run.epochs(3):
        for number, (x, y) in enumerate(data):
            noise = torch.cat([y, y, y[:, :1]], 1)
            judging.zero_grad()
            with torch.no_grad():
                fake = maker(noise)
            (critic(fake).mean() - critic(x).mean()).backward()
            judging.step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-0.3, 0.3)
            if number % 5 == 0:
                making.zero_grad()
                for p in critic.parameters():
                    p.requires_grad_(False)
                (-critic(maker(noise)).mean()).backward()
                for p in critic.parameters():
                    p.requires_grad_(True)
                making.step()
    return maker, critic


@loop
def a_contrastive_loss_of_the_whole_batch(run: Any) -> Any:
    """One sample a step and pairs within it: a loss that couples samples only inside of shares."""
    model = net()
    data = run.prepare(batches(batch=1))
    model, optimizer = run.prepare(model, sgd(model))
    for x, _ in data:
        optimizer.zero_grad()
        a, b = F.normalize(model(x), dim=1), F.normalize(model(x.flip(1)), dim=1)
        (1 - (a * b).sum(1)).mean().backward()
        optimizer.step()
    return model


@loop(refused="optimizer.step")
def an_optimizer_in_backward(run: Any) -> Any:
    model = net()
    made = {p: SGD([p], 0.1) for p in model.parameters()}
    model, *rest = run.prepare(model, *made.values(), batches())

    def hook(p: Tensor) -> None:
        made[p].step()
        made[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for x, y in rest[-1]:
        mse(model, x, y).backward()
    return model


@loop
def reinforce(run: Any) -> Any:
    """Rewards of actions that each sample decides, against a running mean over all workers."""
    model, optimizer, data = parts(run)
    usual = 0.0
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            chances = model(x).log_softmax(1)
            taken = (x[:, 0] > 0).long()
            reward = y.gather(1, taken[:, None])[:, 0]
            (-(chances.gather(1, taken[:, None])[:, 0] * (reward - usual)).mean()).backward()
            optimizer.step()
            usual = 0.9 * usual + 0.1 * run.mean(float(reward.mean()))
    return model, usual
