"""Buckets that travel through a codec: which codec each has, what it keeps, and when that counts.

A codec's state changes with every sum; the new one counts when the turn of the loader is over (`commit`), and is forgotten when the turn
failed (`abort`). Between hosts only the leader of a host has one: inside the host sums are exact.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Size, Tensor

from paceline.codec.codec import Codec, State, Wire, fresh, lift, merge, plain
from paceline.codec.coding import Coding
from paceline.comm.buckets import Bucket, Shape
from paceline.comm.group import Group, Work
from paceline.comm.relay import Relay
from paceline.sync.base import Scene, Slot


class Coded:
    """The codecs of one exchange; `hosts=False` puts every worker behind the codec, also inside a host. Collective."""

    def __init__(self, scene: Scene, codec: Codec | Coding, *, hosts: bool) -> None:
        self._scene, self._codec = scene, lift(codec)
        group = scene.group
        self._relay = Relay(group if hosts else _flat(group), self._codec.stages, trace=scene.trace)
        scene.sides.append(self._relay)
        self._codecs: list[Codec | None] = []  # of each bucket; None: it is exact
        self._shapes: list[list[Size]] = []
        self._states: list[State] = []  # as of the last turn that counted
        self._next: dict[int, State] = {}  # of this turn

    def kind(self, slot: Slot) -> Codec | None:
        """The codec for a parameter; None where it is exact. What isn't real can't be coded."""
        if not slot.parameter.dtype.is_floating_point:
            self._scene.say(f"{slot.name} is {slot.parameter.dtype}: it is exchanged exactly, codecs are for real numbers")
            return None
        chosen = self._codec.choose(slot.name, slot.parameter.shape)
        return None if isinstance(chosen, plain) else chosen

    def lay_out(self, buckets: Sequence[Bucket], shapes: Sequence[Shape], kinds: Sequence[Codec | None]) -> None:
        """These are the buckets, of parameters with these shapes and kinds; all states begin anew."""
        self._codecs = [kinds[bucket.members[0]] for bucket in buckets]
        self._shapes = [[Size(shapes[number].lying) for number in bucket.members] for bucket in buckets]
        self._states = []
        self._next.clear()
        for codec, sizes, bucket in zip(self._codecs, self._shapes, buckets, strict=True):
            self._states.append(codec.init(sizes, bucket.flat.device) if codec is not None and self._relay.leads else {})

    def takes(self, index: int) -> bool:
        """Whether a bucket goes through a codec."""
        return self._codecs[index] is not None

    def all_reduce(self, index: int, flat: Tensor, name: str) -> Work[Tensor]:
        """Start summing a bucket in place."""
        codec, step, scale = self._codecs[index], self._scene.moment.step, self._scene.moment.loss_scale()
        assert codec is not None

        def way(x: Tensor, groups: tuple[Group, ...]) -> Generator[Work[Any], Any, Tensor]:
            draw = torch.Generator(device=x.device).manual_seed((step * 1_000_003 + index) * 65_537 + self._scene.group.rank)
            wire = Wire(groups, scale=scale, step=step, draw=draw)
            found = yield from codec.sum(x, self._shapes[index], self._next.get(index, self._states[index]), wire)
            self._next[index] = found.state
            return found.total

        return self._relay.all_reduce(flat, way, name)

    def commit(self) -> None:
        """The turn counts."""
        for index, state in self._next.items():
            self._states[index] = state
        self._next.clear()

    def abort(self) -> None:
        """It doesn't."""
        self._next.clear()

    def close(self) -> None:
        """End threads and groups."""
        self._scene.sides.remove(self._relay)
        self._relay.close()

    # ---- state

    @property
    def states(self) -> list[State]:
        """Of each bucket, as of the last turn that counted."""
        return list(self._states)

    def state_dict(self) -> dict[str, Any]:
        """What is kept here, the turn under way included; nothing where another worker leads this host."""
        states = [self._next.get(index, state) for index, state in enumerate(self._states)]
        return {"codec": repr(self._codec), "states": states if self._relay.leads else []}

    def adopt(self, found: Sequence[dict[str, Any]]) -> None:
        """Take up what `state_dict` gave on each worker: who leads now sends later what one of those who led has kept, or several."""
        kept = [state["states"] for state in found if state["states"]]
        written = next((state["codec"] for state in found), repr(self._codec))
        if written != repr(self._codec):
            self._scene.say(
                f"the checkpoint was written with codec={written}, this is codec={self._codec!r}: what that had kept is dropped"
            )
            return
        place = self._relay.place
        if place is None or not kept:
            return
        mine = kept[place.rank :: place.size] or [[fresh(state) for state in kept[0]]]
        self._states = [merge(states) for states in zip(*mine, strict=True)]
        self._next.clear()


def _flat(group: Group) -> Group:
    """All workers without regard to hosts."""
    return getattr(group, "flat", group)
