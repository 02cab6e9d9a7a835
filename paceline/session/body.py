"""The run as its survival sees it: what moves to other groups, and what is handed to who has just come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgpack
from torch import nn

from paceline.cluster.snapshot import Snapshot, loads, pack
from paceline.cluster.versioned import Stateful
from paceline.data.loader import ShareLoader
from paceline.session.cast import Cast
from paceline.session.state import Own, Progress
from paceline.session.step import Turns
from paceline.session.survival import Founded, reap
from paceline.sync.base import Scene, Sync

VERSION = 1  # of what is handed over


class Body:
    """See `survival.Heart`. `moved` is told of other groups, `facts` and `learn` are what the run itself hands over."""

    def __init__(self, scene: Scene, cast: Cast, turns: Turns, own: Own) -> None:
        self._scene, self._cast, self._turns, self._own = scene, cast, turns, own
        self.moved: Callable[[Founded], None] = lambda founded: None
        self.lost: Callable[[str], None] = lambda text: None
        self.facts: Callable[[], dict[str, Any]] = dict
        self.learn: Callable[[dict[str, Any]], None] = lambda facts: None

    @property
    def _sync(self) -> Sync:
        return self._own.sync

    def regroup(self, founded: Founded) -> None:
        """See `Heart.regroup`."""
        around, scene = founded.around, self._scene
        old = [*scene.sides, scene.group]
        scene.leave()
        scene.group, scene.hosts, scene.native = founded.group, around.cluster.where(), around.native
        scene.agreement.regroup(founded.group, around.cluster.names(), founded.origins)
        self.moved(founded)
        self._turns.cut_turn(founded.turn)
        self._cast.regroup()
        self._sync.regroup(scene, founded.layout)
        self._turns.settle()
        reap(old)

    def turn(self) -> int:
        """See `Heart.turn`."""
        return self._turns.steps + 1 if self._turns.led is not None else 0

    def layout(self) -> Any:
        """See `Heart.layout`."""
        return self._sync.layout()

    def form(self) -> str:
        """See `Heart.form`."""
        digest = hashlib.sha256(f"{VERSION} {self._cast.state.names}".encode())
        for slot in self._cast.slots:
            digest.update(f"{slot.name} {tuple(slot.parameter.shape)} {slot.parameter.dtype}\n".encode())
        return digest.hexdigest()

    def give(self) -> tuple[bytes, str]:
        """See `Heart.give`."""
        snapshot = self._cast.state.snapshot(copy=False)
        mine = {"random": self._own.randomness.state_dict(), "sync": self._sync.state_dict(), "facts": self.facts()}
        return bytes(msgpack.packb([snapshot.dumps(), pack(mine).dumps()])), self._hash(snapshot)

    def take(self, state: bytes) -> str:
        """See `Heart.take`."""
        whole, mine = msgpack.unpackb(state)
        snapshot = loads(whole)
        self._cast.state.restore(snapshot)
        facts = loads(mine).unpack()
        self._sync.inherit(facts["sync"])
        self._own.randomness.load_state_dict(facts["random"])
        self.learn(facts["facts"])
        return self._hash(snapshot)

    def _hash(self, snapshot: Snapshot) -> str:
        """Of everything, or where optimizers are each worker's own, of the models."""
        if not self._sync.apart:
            return snapshot.sha256()
        names = {name for name, part in zip(self._cast.state.names, self._cast.state.parts, strict=True) if isinstance(part, nn.Module)}
        models = {path: tensor for path, tensor in snapshot.tensors.items() if path.split("/")[0] in names}
        return Snapshot(0, sorted(models), models).sha256()

    def parts(self) -> dict[str, Stateful]:
        """What of the state a turn changes by itself: all but the loaders and the progress."""
        state = self._cast.state
        return {name: part for name, part in zip(state.names, state.parts, strict=True) if not isinstance(part, ShareLoader | Progress)}
