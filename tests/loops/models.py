"""Loops over models of all kinds: layers with state, tied and frozen and unused parameters,
copies, and several at once.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import SGD, Adam, AdamW, SparseAdam
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

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


def trained(run: Any, model: nn.Module, epochs: int = 2, **options: Any) -> Any:
    """Train it plainly, in train mode."""
    model, optimizer, data = parts(run, model, **options)
    train(run, model, optimizer, data, epochs)
    return model, optimizer


# ---- layers


@loop
def batch_norm(run: Any) -> Any:
    return trained(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)


@loop
def batch_norm_without_momentum(run: Any) -> Any:
    return trained(run, net(middle=nn.BatchNorm1d(HIDDEN, momentum=None)), count=PAIRED)


@loop
def batch_norm_in_two_dimensions_without_affine(run: Any) -> Any:
    model = nn.Sequential(
        nn.Unflatten(1, (1, WIDTH, 1)),
        nn.Conv2d(1, 3, 1),
        nn.BatchNorm2d(3, affine=False),
        nn.Flatten(),
    )
    return trained(run, filled(nn.Sequential(model, nn.Linear(3 * WIDTH, OUT))))


@loop
def batch_norm_in_eval_mode_while_training(run: Any) -> Any:
    model = net(middle=nn.BatchNorm1d(HIDDEN))
    model[1].eval()
    return trained(run, model)


@loop
def batch_norm_frozen_in_mid_run(run: Any) -> Any:
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    for epoch in run.epochs(2):
        model.train()
        if epoch == 1:
            model[1].eval()
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return model


@loop
def sync_batch_norm(run: Any) -> Any:
    if run.size == 1:  # outside of paceline torch's wants a process group
        return trained(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    return trained(run, net(middle=nn.SyncBatchNorm(HIDDEN)), count=PAIRED)


@loop
def layer_norm(run: Any) -> Any:
    return trained(run, net(middle=nn.LayerNorm(HIDDEN)))


@loop
def group_norm(run: Any) -> Any:
    return trained(run, net(middle=nn.GroupNorm(2, HIDDEN)))


@loop
def instance_norm(run: Any) -> Any:
    middle = nn.Sequential(
        nn.Unflatten(1, (2, HIDDEN // 2)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()
    )
    return trained(run, net(middle=middle))


@loop
def spectral_norm_by_parametrization(run: Any) -> Any:
    model = net()
    parametrizations.spectral_norm(model[0], n_power_iterations=1)
    fixed(model[0].parametrizations.weight[0])
    return trained(run, model)


@loop
def spectral_norm_by_a_hook(run: Any) -> Any:
    model = net()
    spectral_norm(model[0])
    fixed(model[0], "weight")
    return trained(run, model)


def fixed(module: nn.Module, name: str = "") -> None:
    """Its vectors, which torch draws, are those of everybody."""
    for key in ("u", "v"):
        buffer = getattr(module, f"{name}_{key}" if name else f"_{key}")
        buffer.copy_(
            F.normalize(torch.linspace(0.3, 1.0, buffer.numel(), dtype=torch.float64), dim=0)
        )


@loop
def weight_norm_by_parametrization(run: Any) -> Any:
    model = net()
    parametrizations.weight_norm(model[0])
    return trained(run, model)


@loop
def weight_norm_by_a_hook(run: Any) -> Any:
    model = net()
    weight_norm(model[0])
    return trained(run, model)


@loop
def orthogonal_weights(run: Any) -> Any:
    model = net()
    parametrizations.orthogonal(model[0], use_trivialization=False)
    return trained(run, model)


@loop
def pruned_weights(run: Any) -> Any:
    model = net()
    prune.l1_unstructured(model[0], "weight", amount=0.4)
    return trained(run, model)


@loop
def dropout_of_nothing(run: Any) -> Any:
    return trained(run, net(middle=nn.Dropout(0.0)))


class Counting(nn.Module):
    """Counts its calls, and keeps a running mean of what is the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, OUT)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("size", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.size.lerp_(self.inner.weight.norm(), 0.1)
        return self.inner(x)


@loop
def buffers_that_count(run: Any) -> Any:
    return trained(run, filled(Counting()))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.rnn, self.out = cell(1, 4, batch_first=True), nn.Linear(4, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x[:, :, None])[0][:, -1])


@loop
def an_lstm(run: Any) -> Any:
    return trained(run, filled(Recurrent(nn.LSTM)))


@loop
def a_gru(run: Any) -> Any:
    return trained(run, filled(Recurrent(nn.GRU)))


@loop
def packed_sequences(run: Any) -> Any:
    """Of different lengths, which a collate function pads."""

    def collate(rows: list[Any]) -> Any:
        lengths = torch.tensor([length for length, _, _ in rows])
        return (
            nn.utils.rnn.pad_sequence([x[:length] for length, x, _ in rows], True),
            lengths,
            torch.stack([y for *_, y in rows]),
        )

    model = filled(Recurrent(nn.LSTM))
    data = batches(Mapped(lambda number, x, y: (1 + number % WIDTH, x, y)), collate_fn=collate)
    model, optimizer, data = run.prepare(model, sgd(model), data)
    for _ in run.epochs(2):
        for x, lengths, y in data:
            optimizer.zero_grad()
            packed = pack_padded_sequence(
                x[:, :, None], lengths, batch_first=True, enforce_sorted=False
            )
            out, _ = pad_packed_sequence(model.rnn(packed)[0], batch_first=True)
            F.mse_loss(model.out(out[torch.arange(len(x)), lengths - 1]), y).backward()
            optimizer.step()
    return model


@loop
def a_transformer(run: Any) -> Any:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    front, back = (
        (nn.Unflatten(1, (WIDTH, 1)), nn.Linear(1, 4)),
        (nn.Flatten(), nn.Linear(4 * WIDTH, OUT)),
    )
    model = filled(nn.Sequential(*front, nn.TransformerEncoder(layer, 2), *back))
    return trained(run, model)


@loop
def a_causal_model_with_padding(run: Any) -> Any:
    """The mean over tokens that aren't padding, weighed by their number."""
    table = filled(nn.Sequential(nn.Embedding(11, 4, padding_idx=0), nn.Linear(4, 11)))
    data = Mapped(
        lambda number, x, y: torch.tensor(
            [1 + (number * 3 + n) % 10 if n <= number % 7 else 0 for n in range(8)]
        )
    )
    weigh = lambda batch: float((batch[:, 1:] != 0).sum())  # noqa: E731
    table, optimizer, loader = run.prepare(
        table, AdamW(table.parameters(), 0.01), batches(data), weigh=weigh
    )
    for _ in run.epochs(2):
        for tokens in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(
                table(tokens[:, :-1]).flatten(0, 1),
                tokens[:, 1:].flatten(),
                ignore_index=0,
                reduction="sum",
            )
            loss = loss / (tokens[:, 1:] != 0).sum().clamp(min=1)
            loss.backward()
            optimizer.step()
    return table


@loop
def sparse_embeddings(run: Any) -> Any:
    model = filled(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, OUT)))
    data = batches(Mapped(lambda number, x, y: (torch.tensor([number % 9, number // 3]), y)))
    making = [SparseAdam(list(model[0].parameters()), 0.02), Adam(model[2].parameters(), 0.02)]
    model, one, two, data = run.prepare(model, *making, data)
    for _ in run.epochs(2):
        for x, y in data:
            one.zero_grad()
            two.zero_grad()
            mse(model, x, y).backward()
            one.step()
            two.step()
    return model, one, two


@loop
def sparse_embeddings_with_sgd(run: Any) -> Any:
    model = filled(nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True, mode="sum"), nn.Linear(4, OUT)))
    data = batches(Mapped(lambda number, x, y: (torch.tensor([number % 9, number // 3]), y)))
    model, optimizer, data = run.prepare(model, SGD(model.parameters(), 0.1), data)
    train(run, model, optimizer, data)
    return model


# ---- parameters


@loop
def tied_weights(run: Any) -> Any:
    model = filled(
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH, bias=False))
    )
    model[2].weight = nn.Parameter(model[0].weight.detach().T.contiguous())
    model.add_module("again", nn.Linear(WIDTH, HIDDEN).double())
    model.again.weight, model.again.bias = model[0].weight, model[0].bias
    model.append(filled(nn.Linear(HIDDEN, OUT), 8))
    return trained(run, model)


@loop
def a_layer_used_twice(run: Any) -> Any:
    shared = nn.Linear(HIDDEN, HIDDEN)
    return trained(
        run,
        filled(
            nn.Sequential(
                nn.Linear(WIDTH, HIDDEN), shared, nn.Tanh(), shared, nn.Linear(HIDDEN, OUT)
            )
        ),
    )


@loop
def parameters_never_used(run: Any) -> Any:
    model = net()
    model.extra = filled(nn.Linear(3, 3), 9)
    model.forward = lambda x: model[3](model[2](model[0](x)))
    optimizer = AdamW(model.parameters(), 0.02, weight_decay=0.1)
    model, optimizer, data = run.prepare(model, optimizer, batches())
    train(run, model, optimizer, data)
    return dict(model.state_dict()), optimizer, model.extra.weight.grad is None


class Experts(nn.Module):
    """Each sample goes to one of three, so a share may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, OUT) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        to = (x[:, 0].abs() * 10).long() % 3
        out = x.new_zeros(len(x), OUT)
        for number, expert in enumerate(self.experts):
            if (to == number).any():
                out = out.index_put((torch.where(to == number)[0],), expert(x[to == number]))
        return out


@loop
def parameters_used_by_some_shares(run: Any) -> Any:
    return trained(run, filled(Experts()), 3)


@loop
def parameters_used_by_some_shares_and_adam(run: Any) -> Any:
    model, optimizer, data = parts(
        run, filled(Experts()), lambda model: AdamW(model.parameters(), 0.02, weight_decay=0.1)
    )
    train(run, model, optimizer, data, 3)
    return model, optimizer


@loop
def skipped_layers(run: Any) -> Any:
    """Stochastic depth, drawn alike on all workers."""
    model = filled(
        nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)] + [nn.Linear(WIDTH, OUT)])
    )
    model, optimizer, data = run.prepare(model, Adam(model.parameters(), 0.02), batches())
    numbers = torch.Generator().manual_seed(4)
    for _ in run.epochs(2):
        for x, y in data:
            for layer in model[:-1]:
                if torch.rand((), generator=numbers) < 0.5:
                    x = x + layer(x).tanh()
            optimizer.zero_grad()
            F.mse_loss(model[-1](x), y).backward()
            optimizer.step()
    return model, optimizer


@loop
def frozen_layers(run: Any) -> Any:
    model = net()
    model[0].requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model, optimizer, data = run.prepare(model, optimizer, batches())
    train(run, model, optimizer, data)
    return model


@loop
def layers_thawed_in_mid_run(run: Any) -> Any:
    model = net()
    model[0].requires_grad_(False)
    model, optimizer, data = run.prepare(model, sgd(model), batches())
    for epoch in run.epochs(3):
        if epoch == 1:
            model[0].requires_grad_(True)
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return model, optimizer


@loop
def layers_frozen_in_mid_run(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for epoch in run.epochs(3):
        if epoch == 1:
            model[0].requires_grad_(False)
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return model, optimizer


@loop
def layers_thawed_and_frozen_by_turns(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data):
            model[0].requires_grad_(number % 2 == 0)
            model[3].requires_grad_(number % 2 == 1)
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return model, optimizer


@loop
def a_layer_added_and_prepared(run: Any) -> Any:
    model, optimizer, data = parts(run)
    train(run, model, optimizer, data, 1)
    model.append(filled(nn.Linear(OUT, OUT), 8))
    optimizer.add_param_group({"params": model[-1].parameters(), "lr": 0.05})
    model, optimizer = run.prepare(model, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        mse(model, x, y).backward()
        optimizer.step()
    return model, optimizer


@loop(counted=False, refused="run.prepare")
def a_layer_added_and_not_prepared(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for number in range(40):
        if number == 1:
            model.append(filled(nn.Linear(OUT, OUT), 8))
            optimizer.add_param_group({"params": model[-1].parameters(), "lr": 0.05})
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
    return model


@loop
def scalar_parameters(run: Any) -> Any:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale, self.shift = (
                nn.Linear(WIDTH, OUT),
                nn.Parameter(torch.tensor(1.0)),
                nn.Parameter(torch.zeros(0)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale + self.shift.sum()

    return trained(run, filled(Scaled()))


@loop
def complex_parameters(run: Any) -> Any:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Parameter(
                torch.complex(
                    *torch.linspace(-1, 1, 2 * WIDTH * OUT, dtype=torch.float64).view(2, WIDTH, OUT)
                )
            )

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex128) @ self.inner).abs()

    return trained(run, Turning())


@loop
def parameters_in_a_list_and_a_dict(run: Any) -> Any:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.some = nn.ParameterList([torch.zeros(WIDTH, HIDDEN), torch.zeros(HIDDEN)])
            self.more = nn.ParameterDict({"w": torch.zeros(HIDDEN, OUT)})

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.some[0] + self.some[1]).tanh() @ self.more["w"]

    return trained(run, filled(Listed()))


@loop
def strided_parameters(run: Any) -> Any:
    model = filled(
        nn.Sequential(
            nn.Unflatten(1, (1, WIDTH, 1)),
            nn.Conv2d(1, 4, (2, 1)),
            nn.Flatten(),
            nn.Linear(16, OUT),
        )
    )
    model = model.to(memory_format=torch.channels_last)
    return trained(run, model)


@loop
def nothing_to_train(run: Any) -> Any:
    model = net()
    model.requires_grad_(False)
    model, data = run.prepare(model, batches())
    total = 0.0
    for x, y in data:
        with torch.no_grad():
            total += run.mean(float(mse(model, x, y)))
    return model, total


@loop
def a_module_of_buffers(run: Any) -> Any:
    """Standardises by numbers that are gathered before."""

    class Standard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x - self.mean

    front, model = Standard(), net()
    front, model, optimizer, data = run.prepare(front, model, sgd(model), batches())
    with torch.no_grad():
        seen = torch.cat([run.gather(x) for x, _ in data])
        front.mean.copy_(seen.mean(0))
    for x, y in data:
        optimizer.zero_grad()
        mse(model, front(x), y).backward()
        optimizer.step()
    return front, model


# ---- copies and averages


@loop
def an_average_by_hand(run: Any) -> Any:
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    average = copy.deepcopy(model).requires_grad_(False)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            with torch.no_grad():
                for a, p in zip(average.parameters(), model.parameters(), strict=True):
                    a.lerp_(p, 0.1)
                for a, b in zip(average.buffers(), model.buffers(), strict=True):
                    a.copy_(b)
    return model, average


@loop
def an_averaged_model_evaluated(run: Any) -> Any:
    model, optimizer, data = parts(run)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    held = run.prepare(batches(shuffle=False), train=False)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
            average.update_parameters(model)
    average.eval()
    with torch.no_grad():
        seen = torch.cat([run.gather(average(x)) for x, _ in held])
    return model, dict(average.module.state_dict()), seen


@loop(counted=False)
def weight_averaging_with_update_bn(run: Any) -> Any:
    """The last epochs are averaged, and the statistics of BatchNorm taken again, of whole
    batches on each worker.
    """
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    average, schedule = AveragedModel(model), SWALR(optimizer, 0.05, anneal_epochs=2)
    schedule = run.prepare(schedule)
    train(run, model, optimizer, data, 1)
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            mse(model, x, y).backward()
            optimizer.step()
        average.update_parameters(model)
        schedule.step()
    update_bn(batches(Samples(PAIRED), shuffle=False), average)
    return dict(average.module.state_dict())


@loop
def distillation(run: Any) -> Any:
    teacher = net(middle=nn.BatchNorm1d(HIDDEN), seed=8).eval()
    model, optimizer, data = parts(run, net(middle=nn.BatchNorm1d(HIDDEN)), count=PAIRED)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            with torch.no_grad():
                hint = teacher(x)
            (mse(model, x, y) + F.mse_loss(model(x), hint)).backward()
            optimizer.step()
    return model, teacher


@loop
def a_teacher_copied_from_the_model(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        teacher = copy.deepcopy(model).eval().requires_grad_(False)
        for x, y in data:
            optimizer.zero_grad()
            (mse(model, x, y) + 0.5 * F.mse_loss(model(x), teacher(x.flip(1)))).backward()
            optimizer.step()
    return model, teacher


@loop
def a_moving_teacher(run: Any) -> Any:
    """BYOL, MoCo, mean teacher: it is prepared, and moved by hand."""
    model, teacher = net(), net(seed=8).requires_grad_(False)
    model, teacher, optimizer, data = run.prepare(model, teacher, sgd(model), batches())
    for _ in run.epochs(2):
        for x, _ in data:
            optimizer.zero_grad()
            F.mse_loss(model(x), teacher(x * 1.1)).backward()
            optimizer.step()
            with torch.no_grad():
                for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
                    t.mul_(0.95).add_(p, alpha=0.05)
    return model, teacher


@loop
def a_model_put_back_to_its_best(run: Any) -> Any:
    model, optimizer, data = parts(run)
    best, kept = float("inf"), None
    for _ in run.epochs(3):
        total = 0.0
        for x, y in data:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            optimizer.step()
            total += run.mean(loss).item()
        if total < best:
            best, kept = total, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return model, best


@loop
def several_models_in_one_optimizer(run: Any) -> Any:
    one, two = filled(nn.Linear(WIDTH, HIDDEN)), filled(nn.Linear(HIDDEN, OUT), 6)
    optimizer = SGD([{"params": one.parameters()}, {"params": two.parameters(), "lr": 0.02}], 0.1)
    one, two, optimizer, data = run.prepare(one, two, optimizer, batches())
    train(run, one, optimizer, data, loss=lambda model, x, y: F.mse_loss(two(model(x).tanh()), y))
    return one, two, optimizer


@loop
def several_optimizers_for_one_model(run: Any) -> Any:
    model = net()
    weights, others = (
        [p for p in model.parameters() if p.dim() > 1],
        [p for p in model.parameters() if p.dim() < 2],
    )
    model, one, two, data = run.prepare(model, Adam(weights, 0.02), SGD(others, 0.1), batches())
    for _ in run.epochs(2):
        for x, y in data:
            model.zero_grad()
            mse(model, x, y).backward()
            one.step()
            two.step()
    return model, one, two


@loop
def a_model_that_gives_a_dict(run: Any) -> Any:
    """model(**batch).loss, as from the Hugging Face hub."""

    class Output(dict):
        __getattr__ = dict.__getitem__

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, OUT)

        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Output:
            logits = self.inner(inputs)
            return Output(
                logits=logits, loss=None if labels is None else F.mse_loss(logits, labels)
            )

    model = filled(Named())
    data = batches(Mapped(lambda number, x, y: {"inputs": x, "labels": y}))
    model, optimizer, data = run.prepare(model, AdamW(model.parameters(), 0.02), data)
    for _ in run.epochs(2):
        for batch in data:
            batch = {key: value.to(run.device) for key, value in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss.item())
    return model, optimizer


# ---- how a model is run


@loop
def checkpointing_reentrant(run: Any) -> Any:
    model = net()
    model, optimizer, data = run.prepare(model, sgd(model), batches())
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            middle = checkpoint(
                model[:3], x.clone().requires_grad_(), use_reentrant=True, preserve_rng_state=False
            )
            F.mse_loss(model[3](middle), y).backward()
            optimizer.step()
    return model


@loop
def checkpointing_non_reentrant(run: Any) -> Any:
    model = net(middle=nn.LayerNorm(HIDDEN))
    model, optimizer, data = run.prepare(model, sgd(model), batches())
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(
                model[3](checkpoint(model[:3], x, use_reentrant=False, preserve_rng_state=False)), y
            ).backward()
            optimizer.step()
    return model


@loop
def vmap_over_samples(run: Any) -> Any:
    model, optimizer, data = parts(run)
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            weights = dict(model.named_parameters())
            each = torch.func.vmap(
                lambda a, b: F.mse_loss(torch.func.functional_call(model, weights, (a,)), b)  # noqa: B023
            )(x, y)
            each.mean().backward()
            optimizer.step()
    return model


@loop
def a_function_with_its_own_backward(run: Any) -> Any:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    model, optimizer, data = parts(run)
    train(
        run,
        model,
        optimizer,
        data,
        loss=lambda model, x, y: F.mse_loss(Straight.apply(model(x) * 8) / 8, y),
    )
    return model


@loop(threads="torch.jit has one state for all threads")
def a_traced_model(run: Any) -> Any:
    return trained(run, torch.jit.trace(net(), torch.zeros(3, WIDTH, dtype=torch.float64)))


@loop(threads="torch.jit has one state for all threads")
def a_scripted_model(run: Any) -> Any:
    return trained(run, torch.jit.script(net()))


@loop
def hooks_of_all_kinds(run: Any) -> Any:
    model, optimizer, data = parts(run)
    seen = {"forward": 0, "backward": 0, "tensor": 0, "accumulated": 0, "step": 0}

    def count(what: str) -> Any:
        def hook(*_: Any) -> None:
            seen[what] += 1

        return hook

    model[0].register_forward_hook(count("forward"))
    model[3].register_full_backward_hook(count("backward"))
    model[3].weight.register_hook(count("tensor"))
    model[3].weight.register_post_accumulate_grad_hook(count("accumulated"))
    optimizer.register_step_post_hook(count("step"))
    train(run, model, optimizer, data)
    return model, seen


@loop
def hooks_that_scale_gradients(run: Any) -> Any:
    """A hook on a parameter sees its share's gradient: what is linear in it is right."""
    model, optimizer, data = parts(run)
    model[0].weight.register_hook(lambda g: g * 0.5)
    train(run, model, optimizer, data)
    return model


@loop
def activations_that_are_kept(run: Any) -> Any:
    model, optimizer, data = parts(run)
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, out: kept.append(out))
    for _ in run.epochs(2):
        for x, y in data:
            kept.clear()
            optimizer.zero_grad()
            (mse(model, x, y) + 0.01 * kept[0].abs().mean()).backward()
            optimizer.step()
    return model


@loop
def one_sample_a_batch(run: Any) -> Any:
    model = net()
    model, optimizer, data = run.prepare(model, sgd(model), batches(batch=1))
    train(run, model, optimizer, data, 1)
    return model


@loop(near=2e-2)
def autocast_to_bfloat16(run: Any) -> Any:
    model, optimizer, data = parts(run, net().float())
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x.float()), y.float())
            loss.backward()
            optimizer.step()
    return model


@loop(near=5e-2)
def parameters_in_bfloat16(run: Any) -> Any:
    model, optimizer, data = parts(
        run, net().to(torch.bfloat16), lambda model: SGD(model.parameters(), 0.1)
    )
    train(
        run,
        model,
        optimizer,
        data,
        loss=lambda model, x, y: F.mse_loss(model(x.bfloat16()), y.bfloat16()),
    )
    return model


@loop(near=2e-2)
def parameters_in_float16(run: Any) -> Any:
    model, optimizer, data = parts(
        run, net().to(torch.float16), lambda model: SGD(model.parameters(), 0.1)
    )
    train(
        run, model, optimizer, data, loss=lambda model, x, y: F.mse_loss(model(x.half()), y.half())
    )
    return model


@loop
def a_scaler_that_is_off(run: Any) -> Any:
    model, optimizer, data = parts(run)
    scaler = run.prepare(torch.amp.GradScaler("cpu", enabled=False))
    for _ in run.epochs(2):
        for x, y in data:
            optimizer.zero_grad()
            scaler.scale(mse(model, x, y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return model


@loop
def a_scaler_that_grows_and_skips(run: Any) -> Any:
    """A scale that overflows once on the samples of one worker: all skip that step."""
    model, optimizer, data = parts(run)
    scaler = run.prepare(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
    scales = []
    for _ in run.epochs(2):
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = mse(model, x, y)
            if number == 1:
                loss = loss * torch.where((x[:, 0] == run_max(run, x)).any(), torch.inf, 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return model, scales


def run_max(run: Any, x: Tensor) -> float:
    """The greatest first feature of the whole batch."""
    return float(run.gather(x[:, 0]).max())


@loop
def as_many_batches_as_samples(run: Any) -> Any:
    model = net()
    model, optimizer, data = run.prepare(model, sgd(model), batches(batch=COUNT * 2))
    train(run, model, optimizer, data)
    return model


@loop(threads="torch._dynamo has one state for all threads")
def a_compiled_model(run: Any) -> Any:
    model, optimizer, data = parts(run)
    train(run, torch.compile(model, backend="aot_eager"), optimizer, data)
    return model, optimizer


@loop(threads="torch._dynamo has one state for all threads")
def a_model_compiled_before_prepare(run: Any) -> Any:
    model = torch.compile(net(), backend="eager")
    model, optimizer, data = run.prepare(model, sgd(model), batches())
    train(run, model, optimizer, data)
    return dict(model.state_dict())
