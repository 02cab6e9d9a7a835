"""The search for the largest micro-batch, as plain data, and the meter of what operations take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.cluster import machine
from paceline.session.balance.memory import PART, AllocationMeter, Tried, is_out_of_memory, largest, limit_of, nbytes, predict

FIXED, EACH = 5_000, 3_000


def found(limit, *, share=12, most=100, fails=1_000, first=1, curve=lambda samples: 0):
    """What the search gives, and which samples were tried."""
    asked = []

    def attempt(samples):
        asked.append(samples)
        return None if samples >= fails else FIXED + EACH * samples + curve(samples)

    return largest(attempt, share=share, most=most, limit=limit, fixed=FIXED, first=first)[0], asked


@pytest.mark.parametrize("fits", [1, 2, 3, 5, 7, 11])
def test_what_would_go_over_the_limit_is_not_tried(fits):
    samples, asked = found(FIXED + EACH * fits)
    assert samples == fits and max(asked) == fits


def test_what_runs_out_of_memory_is_narrowed_down():
    samples, asked = found(10**9, fails=7)
    assert samples == 6 and asked[:4] == [1, 2, 4, 8] and samples in asked


def test_more_than_the_share_is_predicted_and_never_tried():
    samples, asked = found(FIXED + EACH * 18)
    assert samples == 18 and asked == [1, 2, 4, 8, 12]
    assert found(10**9)[0] == 100


def test_no_memory_for_one_sample_is_none_at_all():
    assert found(FIXED + EACH - 1) == (0, [1])
    assert found(10**9, fails=1) == (0, [1])


def test_a_model_that_needs_two_samples_is_tried_with_two():
    assert found(FIXED + EACH * 5, first=2) == (5, [2, 4, 5])
    assert found(10**9, share=1, first=2) == (100, [2])


@pytest.mark.parametrize("share", [1, 12])
def test_where_two_samples_do_not_fit_one_may(share):
    assert found(FIXED + EACH, share=share, first=2) == (1, [2])
    assert found(FIXED + EACH - 1, share=share, first=2) == (0, [2])
    assert found(10**9, share=share, first=2, fails=2) == (1, [2])


def test_what_grows_faster_and_faster_is_stopped_by_its_last_growth():
    samples, asked = found(FIXED + EACH * 12, curve=lambda samples: 50 * samples**2)
    assert FIXED + EACH * samples + 50 * samples**2 <= FIXED + EACH * 12 and max(asked) < 12


def test_predictions_take_the_steepest_growth():
    assert predict([Tried(1, 100)], 4, 40) == 100 + 3 * 60
    assert predict([Tried(1, 100), Tried(2, 110), Tried(4, 150)], 8, 100) == 150 + 4 * 20


def test_a_limit_is_a_part_of_what_is_free_for_each_worker(monkeypatch):
    monkeypatch.setattr(machine, "memory_size", lambda: machine.MemorySize(1_000, 900))
    assert limit_of(torch.device("cpu"), 3) == round(PART * 300)


def test_the_meter_counts_what_is_held_and_the_peak():
    model = nn.Linear(100, 50)
    with AllocationMeter([model]) as meter:
        one = torch.zeros(1000)
        assert (meter.now, meter.peak) == (4000, 4000)
        view = one[3:].view(-1)
        assert meter.now == 4000
        two = torch.ones(500) + 1  # the ones are freed
        assert (meter.now, meter.peak) == (6000, 8000)
        model.weight.t()
        assert meter.now == 6000
        del one
        assert meter.now == 6000
        del view
        assert meter.now == 2000
    del two


def test_the_meter_counts_what_a_backward_takes():
    model = nn.Sequential(nn.Linear(10, 1000), nn.Tanh(), nn.Linear(1000, 1))
    with AllocationMeter([model]) as meter:
        loss = model(torch.zeros(64, 10)).sum()
        kept = meter.now
        gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert kept >= 64 * 1000 * 4 and meter.peak >= kept + 64 * 1000 * 4
    assert sum(x.numel() * 4 for x in gradients) == nbytes(model.parameters())


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
        (None, False),
    ],
)
def test_errors_that_say_that_memory_has_run_out(error, is_it):
    assert is_out_of_memory(error) is is_it


def test_the_allocator_of_the_cpu_raises_what_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
