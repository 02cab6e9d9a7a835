"""A prepared loader in the form that Lightning's loops iterate over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.data.loader import ShareLoader


class LightningLoader:
    """This worker's share of each global batch, with the attributes of the script's DataLoader.

    Lightning stops an epoch by counting batches, and doesn't ask for another one after the last. So
    the callback of the strategy ends turns and epochs (`BatchEnds`).

    Args:
        shares: The prepared loader.
    """

    def __init__(self, shares: ShareLoader) -> None:
        self.shares = shares

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask for attributes before `shares` is set.
        if name == "shares":
            raise AttributeError(name)
        return getattr(self.shares, name)

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[Any]:
        # A generator, whose epoch begins with its first batch: Lightning also makes iterators that
        # it drops unused, such as when it resumes at the end of an epoch.
        yield from self.shares

    def state_dict(self) -> dict[str, Any]:
        """Position of the loader: inside the loop body the present step counts as done."""
        return self.shares.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of a `state_dict`, also with another number of workers."""
        self.shares.load_state_dict(state)
