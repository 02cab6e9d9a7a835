"""Residuals of codecs by parameter, so that they survive a change of the buckets.

    saved buckets    | a b | c d e |
                       split_residuals
    by parameter     a   b   c   d   e
                       rebuild_states
    present buckets  | e | d c b a |

Buckets change with `bucket_mb`, and if parameters are frozen, unfrozen or added. Residuals are
gradients that still have to be sent, so they are kept. Other state of a codec, such as the place
where its next sum begins, starts anew in a bucket of other parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paceline.codec.codec import State, have_same_residuals, make_fresh_state, pick_residuals

# For each bucket: [name, number of elements] of each parameter, in the order in memory.
BucketNames: TypeAlias = list[list[list[Any]]]


def split_residuals(states: Sequence[State], layout: BucketNames) -> dict[str, State]:
    """Split the residuals of buckets into those of their parameters, by name.

    `states` is empty on a worker that leads no host.
    """
    residual_by_name: dict[str, State] = {}
    for state, members in zip(states, layout, strict=bool(states)):
        start = 0
        for name, numel in members if state else ():
            residual_by_name[name] = _narrow_state(pick_residuals(state), start, numel)
            start += numel
    return residual_by_name


def rebuild_states(
    states: Sequence[State], layout: BucketNames, parts: Mapping[str, State]
) -> list[State]:
    """Put the residuals of parameters into the states of buckets.

    Args:
        states: State of each bucket, with residuals of the right shapes.
        layout: Parameters of each bucket.
        parts: New residuals, by name of the parameter.

    Returns:
        States with the new residuals. A parameter gets zeros if it has no new residual of the right
        shape. A bucket without any new residual keeps its state.
    """
    rebuilt = []
    for state, members in zip(states, layout, strict=True):
        present = split_residuals([state], [members])
        chosen = [
            parts[name]
            if name in parts and have_same_residuals(parts[name], part)
            else _zeros_like_state(part)
            for name, part in present.items()
        ]
        has_new = chosen and any(name in parts for name in present)
        rebuilt.append(_join_residuals(state, chosen) if has_new else state)
    return rebuilt


def convert_states(
    saved_states: list[list[State]],
    saved_layout: BucketNames,
    states: Sequence[State],
    layout: BucketNames,
) -> tuple[list[list[State]], str]:
    """Convert the saved states of all leaders to the present buckets.

    Args:
        saved_states: States of the saved buckets, of each leader.
        saved_layout: Parameters of the saved buckets.
        states: This worker's states of the present buckets, which show the fields of its codecs.
        layout: Parameters of the present buckets.

    Returns:
        States of the present buckets, of each former leader, and the parameters whose residuals
        have no place in them, in words; "" if there are none.
    """
    if saved_layout == layout:
        return saved_states, ""
    empty = [make_fresh_state(state) for state in states]
    converted = [
        rebuild_states(empty, layout, split_residuals(each, saved_layout)) for each in saved_states
    ]
    return converted, name_dropped(layout, saved_layout, saved_states[0])


def name_dropped(layout: BucketNames, saved: BucketNames, states: Sequence[State]) -> str:
    """Parameters with saved residuals that lie in no present bucket, in words; "" for none."""
    present = {name for members in layout for name, _ in members}
    dropped = [
        name
        for name, part in split_residuals(states, saved).items()
        if part and name not in present
    ]
    more = f" and {len(dropped) - 1} more" if len(dropped) > 1 else ""
    return f"{dropped[0]}{more}" if dropped else ""


def _narrow_state(state: State, start: int, numel: int) -> State:
    return {
        key: _narrow_state(value, start, numel)
        if isinstance(value, dict)
        else value[start : start + numel]
        for key, value in state.items()
    }


def _zeros_like_state(state: State) -> State:
    return {
        key: _zeros_like_state(value) if isinstance(value, dict) else torch.zeros_like(value)
        for key, value in state.items()
    }


def _join_residuals(state: State, parts: Sequence[State]) -> State:
    """Replace the residual of a bucket by those of its parameters, one after the other."""
    joined: State = {}
    for key, value in state.items():
        if key == "residual":
            joined[key] = torch.cat([part[key].to(value) for part in parts])
        elif isinstance(value, dict):
            # A codec around another one keeps that one's state as a part of its own.
            joined[key] = _join_residuals(value, [part[key] for part in parts])
        else:
            joined[key] = value
    return joined
