"""Residuals of codecs by parameter, so that they survive a change of the buckets.

    saved    | a b | c d e |       residual of a, of b, ...       now    | e | d c b a |

Buckets change with `bucket_mb`, and if parameters are frozen, unfrozen or added. Only residuals are
parts of a sum that must not get lost. Other state of a codec, such as the place where its next sum
begins, starts anew in a bucket of other parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paceline.codec.codec import State, alike, fresh, residuals

# of each bucket: the name and the number of elements of each parameter, as they lie
Layout: TypeAlias = list[list[list[Any]]]


def parted(states: Sequence[State], layout: Layout) -> dict[str, State]:
    """Cut the residuals of buckets into those of their parameters, by name.

    No states: there are none on this worker.
    """
    found: dict[str, State] = {}
    for state, members in zip(states, layout, strict=bool(states)):
        at = 0
        for name, numel in members if state else ():
            found[name] = _narrow(residuals(state), at, numel)
            at += numel
    return found


def relaid(states: Sequence[State], layout: Layout, parts: Mapping[str, State]) -> list[State]:
    """States of buckets with the residuals of `parts`; zeros for a parameter without a fitting
    one.
    """
    made = []
    for state, members in zip(states, layout, strict=True):
        mine = parted([state], [members])
        kept = [
            parts[name] if name in parts and alike(parts[name], part) else _zeros(part)
            for name, part in mine.items()
        ]
        made.append(_joined(state, kept) if kept and any(name in parts for name in mine) else state)
    return made


def adopted(
    kept: list[list[State]], saved: Layout, states: Sequence[State], layout: Layout
) -> tuple[list[list[State]], str]:
    """Convert the saved states of workers to the present buckets.

    Also returns the names of parameters whose residuals have no place here (`lost`). `states` are
    this worker's states, which show the fields that its codecs keep.
    """
    if saved == layout:
        return kept, ""
    empty = [fresh(state) for state in states]
    return [relaid(empty, layout, parted(theirs, saved)) for theirs in kept], lost(
        layout, saved, kept[0]
    )


def lost(layout: Layout, saved: Layout, states: Sequence[State]) -> str:
    """Names of parameters with saved residuals that lie in no bucket now."""
    here = {name for members in layout for name, _ in members}
    gone = [name for name, part in parted(states, saved).items() if part and name not in here]
    more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    return f"{gone[0]}{more}" if gone else ""


def _narrow(state: State, at: int, numel: int) -> State:
    return {
        key: _narrow(value, at, numel) if isinstance(value, dict) else value[at : at + numel]
        for key, value in state.items()
    }


def _zeros(state: State) -> State:
    return {
        key: _zeros(value) if isinstance(value, dict) else torch.zeros_like(value)
        for key, value in state.items()
    }


def _joined(state: State, parts: Sequence[State]) -> State:
    """Put the residuals of parameters, side by side, in the place of those of their bucket."""
    made: State = {}
    for key, value in state.items():
        if key == "residual":
            made[key] = torch.cat([part[key].to(value) for part in parts])
        else:
            made[key] = (
                _joined(value, [part[key] for part in parts]) if isinstance(value, dict) else value
            )
    return made
