"""Registers the backend `paceline` and the rendezvous `paceline://` with torch.distributed.

`import torch` calls `register` if paceline is installed, through the entry point `torch.backends`
in pyproject.toml. So this module imports torch and paceline inside of its functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

NAME = "paceline"


def register() -> None:
    """Register the backend and the rendezvous. A second call does nothing."""
    from torch import distributed as dist

    # `_plugins` is private in torch; if it is renamed, this line raises AttributeError
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        from torch.distributed.rendezvous import register_rendezvous_handler

        dist.Backend.register_backend(NAME, _create_backend, extended_api=True, devices=["cpu"])
        register_rendezvous_handler(NAME, _meet_workers)


def _create_backend(options: Any, chosen: Any = None) -> Any:
    from paceline.session.torch_backend import create_process_group

    return create_process_group(options, chosen)


def _meet_workers(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Give torch the store of this job, with the rank and size from its launcher."""
    from paceline.cluster.discover import discover_place
    from paceline.cluster.store import connect_store
    from paceline.errors import UsageError

    if url != f"{NAME}://":
        raise UsageError(
            f"init_method is {url!r}, but rank and size come from the launcher: "
            f"give '{NAME}://' alone, without rank and world_size"
        )
    place = discover_place()
    yield connect_store(place, deadline=timeout.total_seconds()).torch, place.rank, place.size
