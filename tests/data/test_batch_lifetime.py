"""A batch that a loader lends is known as long as the script holds any of it, and data that the
data set holds is not the script's.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.data.batch_lifetime import held_addresses, is_alive, storage_addresses, track_batch


def test_a_batch_is_alive_while_a_part_of_it_is_held() -> None:
    held = [{"x": torch.ones(3), "rest": (torch.zeros(2), np.ones(2))}]
    references = track_batch(held[0])
    assert len(references) == 3 and is_alive(references)
    kept = held[0]["x"]
    held.clear()
    assert is_alive(references) and held_addresses(references) == set(storage_addresses([kept]))
    del kept
    assert not is_alive(references) and held_addresses(references) == set()


def test_what_a_data_set_holds_itself_is_not_followed() -> None:
    data = torch.ones(3)
    held = [[data, torch.zeros(2)]]
    references = track_batch(held[0])  # not inside of an assertion, which would hold the batch, too
    assert len(references) == 1
    held.clear()
    assert not is_alive(references) and data.sum() == 3


def test_a_batch_that_others_hold_as_a_whole_is_not_followed() -> None:
    held = [[torch.zeros(2)]]
    kept = held[0]
    references = track_batch(held[0])
    assert references == [] and len(kept) == 1


def test_views_lie_where_their_tensor_does() -> None:
    whole = torch.arange(6.0)
    assert set(storage_addresses([whole[2:], {"a": [whole.view(2, 3)]}])) == {
        whole.untyped_storage().data_ptr()
    }
    assert list(storage_addresses([torch.empty(0), 3, "text"])) == []
