"""Plain values, arrays and tensors travel with their types; anything else is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.data.serialization import pack_value, unpack_value
from paceline.errors import DataError


def test_values_travel_with_their_types():
    value = {
        "a": (1, [2.5, None, True], "x", b"y", 2**100, -(2**70)),
        3: torch.arange(6).reshape(2, 3),
        "b": {"empty": torch.empty(0, 4), "half": torch.ones((), dtype=torch.bfloat16)},
        "n": np.arange(3, dtype=np.int16),
        "s": np.float32(1.5),
    }
    back = unpack_value(pack_value(value))
    assert back["a"] == value["a"] and type(back["a"]) is tuple
    assert torch.equal(back[3], value[3]) and back["b"]["empty"].shape == (0, 4)
    assert back["b"]["half"].dtype == torch.bfloat16 and back["b"]["half"].shape == ()
    assert (
        back["n"].dtype == np.int16
        and back["s"] == np.float32(1.5)
        and type(back["s"]) is np.float32
    )
    with pytest.raises(DataError, match=r"a batch holds a builtins\.set"):
        pack_value({1, 2}, what="a batch")
