from __future__ import annotations

import pytest
import torch

from paceline.parallel.torch_tensor import set_version, storage_key


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_have_the_key_of_their_memory(device: str) -> None:
    x, other = torch.zeros(4, device=device), torch.zeros(4, device=device)
    assert storage_key(x) == storage_key(x[1:]) == storage_key(x.view(2, 2))
    assert storage_key(x) != storage_key(other)


def test_a_backward_sees_the_version_that_was_set() -> None:
    x, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    y = (x * weight).sum()
    set_version(x, x._version + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(retain_graph=True)
    set_version(x, x._version - 1)
    y.backward()
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 1.0]
