from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader

from paceline.errors import Mismatch
from tests.harness.runs import Numbered, workers


def drawn(model):
    """The model in float64, with weights that are the same each time."""
    generator = torch.Generator().manual_seed(1)  # threads share torch's own
    with torch.no_grad():
        for p in model.double().parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def evaluating(pad):
    """Three workers evaluate batches of two samples, by a model that can't take a batch of no
    rows.
    """

    def body(run):
        model, loader = run.prepare(
            drawn(nn.Linear(6, 2)), DataLoader(Numbered(4), 2), train=False, pad=pad
        )
        with torch.no_grad():
            seen = [(model(x.view(x.size(0), -1)), y) for x, y in loader]
            rows, losses = [], []
            for x, y in loader:
                losses.append(run.mean(((model(x.view(x.size(0), -1)) - y) ** 2).mean()))
                rows.append(run.gather(y))
        return len(seen), torch.cat(rows), torch.stack(losses)

    return workers(3, body)


def test_a_batch_of_no_rows_that_a_script_dies_of_is_named():
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements") as caught:
        evaluating(pad=False)
    (note,) = [note for note in caught.value.__notes__ if "empty" in note]
    assert "2 samples for 3 workers" in note and "pad=True" in note


def test_padded_shares_are_left_out_of_what_is_gathered_and_averaged():
    y, x = Numbered(4).y, Numbered(4).x
    model = drawn(nn.Linear(6, 2))
    expected = ((model(x) - y) ** 2).detach().view(2, -1).mean(1)
    for count, rows, losses in evaluating(pad=True):
        assert count == 2 and torch.equal(rows, y)
        torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("pad", [False, True])
def test_rows_that_are_dealt_by_cost_are_gathered_in_order(pad):
    """Costs are such that the last samples of a batch go to the first worker."""

    def body(run):
        loader = run.prepare(
            DataLoader(Numbered(11), 4),
            train=False,
            cost=lambda sample: float(-sample[1][0]) + 9,
            pad=pad,
        )
        rows, sizes = [], []
        with torch.no_grad():
            for _, y in loader:
                rows.append(run.gather(y))
                sizes.append(len(run.gather(y.sum().reshape(1))))
        return torch.cat(rows), sizes

    for rows, sizes in workers(3, body):
        assert torch.equal(rows, Numbered(11).y) and sizes == [3, 3, 3]


def averaged(prepares):
    """The statistics of an average of the model, taken over a prepared loader, and what it gives
    then.
    """

    def body(run):
        model = drawn(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
        model, loader = run.prepare(model, DataLoader(Numbered(13), 5))
        average = AveragedModel(model)
        if prepares:
            run.prepare(average)
        update_bn(loader, average)
        return average.module[1].running_var, average.eval()(Numbered(13).x)

    return body


@pytest.mark.parametrize("prepares", [False, True])
def test_a_copy_takes_statistics_of_all_samples(prepares):
    (expected,) = workers(1, averaged(prepares))
    for found in workers(2, averaged(prepares)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_copy_that_one_worker_alone_runs_in_training_mode():
    def body(run):
        model = drawn(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
        model, loader = run.prepare(model, DataLoader(Numbered(13), 5))
        twin = copy.deepcopy(model)
        if run.rank == 0:  # outside of loops over loaders it exchanges nothing
            x, norm = Numbered(13).x[:, :3], twin[1]
            torch.testing.assert_close(
                norm(x), F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
            )
        for x, y in loader:
            if run.rank == 0:
                twin(x)
            (model(x) - y).square().mean().backward()

    with pytest.raises(Mismatch, match="of a copy"):
        workers(2, body)
