"""A prepared loader in the form that Fabric wraps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.loader import ShareLoader


class FabricLoader:
    """This worker's share of each global batch, with the attributes of the script's DataLoader.

    Fabric copies all attributes of a loader (`dataset`, `batch_size`, ...) into its own wrapper.

    Args:
        shares: The prepared loader.
        loader: The DataLoader that it was prepared from.
    """

    def __init__(self, shares: ShareLoader, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self.shares = shares

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.shares)

    def state_dict(self) -> dict[str, Any]:
        """Position of the loader: inside the loop body the present step counts as done."""
        return self.shares.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of a `state_dict`, also with another number of workers."""
        self.shares.load_state_dict(state)
