"""Modules that are built under meta() have shapes, buffers, and no memory."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.parallel.meta import WriteLog, birth_of, meta


def test_parameters_have_no_memory_and_buffers_do() -> None:
    with meta():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert all(
        parameter.is_meta and type(parameter) is nn.Parameter for parameter in model.parameters()
    )
    assert [list(parameter.shape) for parameter in model.parameters()] == [[3, 2], [3], [3], [3]]
    assert torch.equal(model[1].running_var, torch.ones(3))
    assert not nn.Linear(1, 1).weight.is_meta, "it ends with the block"


def test_what_was_frozen_tied_or_of_another_dtype_stays_so() -> None:
    with meta():
        model = nn.Sequential(
            nn.Embedding(4, 3), nn.Linear(3, 4, dtype=torch.bfloat16), nn.Linear(3, 4, bias=False)
        )
        model[0].weight.requires_grad_(requires_grad=False)
        model[2].weight = model[0].weight
    assert model[2].weight is model[0].weight and not model[0].weight.requires_grad
    assert model[1].weight.dtype == torch.bfloat16
    known = birth_of(model[2].weight)
    assert known is not None and known.module() is model[0]
    assert birth_of(copy.deepcopy(model[0].weight)) is None and birth_of(torch.ones(1)) is None


def test_other_threads_build_as_always() -> None:
    built: list[nn.Module] = []
    with meta():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
    assert not built[0].weight.is_meta  # type: ignore[union-attr]


def test_lazy_modules_are_refused() -> None:
    with (
        pytest.raises(UsageError, match=r"LazyLinear.weight gets its shape from the first batch"),
        meta(),
    ):
        nn.LazyLinear(3)
    assert not nn.Linear(1, 1).weight.is_meta


def test_writes_are_noted_whatever_they_go_through() -> None:
    x, y = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    with WriteLog() as log:
        x.data.normal_(0, 0.02)
        x[1:].zero_()
        y + 1
        torch.add(x, 1, out=y)
    assert sorted(log.calls_writing_to(x)) == [
        "aten.normal_.default 0.0 0.02",
        "aten.zero_.default ",
    ]
    assert len(log.calls_writing_to(y)) == 1
    with log:
        copy_of_it = x.double()
        real = torch.ones(2).zero_()
    assert (
        log.calls_writing_to(copy_of_it) == log.calls_writing_to(x)
        and log.calls_writing_to(real) == set()
    )
