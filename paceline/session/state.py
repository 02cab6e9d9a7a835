"""Checkpoints of a run: all that is state, written by the first worker, read by the first and handed to all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch.optim import Optimizer

from paceline.cluster.snapshot import Snapshot, loads, pack
from paceline.cluster.versioned import Randomness, Versioned
from paceline.comm.group import Group
from paceline.comm.ordered import Agreement
from paceline.data.loader import ShareLoader
from paceline.fault import checkpoint
from paceline.session.step import Turns
from paceline.sync.base import Sync


class Progress:
    """Where a run is, as state: the epoch of `Run.epochs` and the steps taken."""

    def __init__(self, turns: Turns, loaders: list[ShareLoader]) -> None:
        self._turns, self._loaders = turns, loaders
        self.epoch = 0  # under way or next, in the loop over `Run.epochs` that has the number `loop`, from 1 on
        self.loop = 0
        self._loops = 0  # begun in this process
        self._began_at: list[int] = []

    def enter(self) -> bool:
        """A loop over `Run.epochs` begins; False for one that was over at the checkpoint."""
        self._loops += 1
        if self._loops > self.loop:
            self.loop, self.epoch = self._loops, 0
        return self._loops == self.loop

    def begin(self) -> None:
        """An epoch begins."""
        self._began_at = [loader.epoch for loader in self._loaders]

    def end(self) -> None:
        """It is over."""
        self.epoch += 1
        self._began_at = []

    def state_dict(self) -> dict[str, Any]:
        """As `load_state_dict` reads it; inside the loop body the present step counts as taken, as the loader counts it."""
        turn = self._turns.led
        inside = turn is not None and turn.last_micro
        training = [(loader, began) for loader, began in zip(self._loaders, self._began_at, strict=False) if loader.terms.training]
        over = any(loader.epoch > began for loader, began in training) and not any(loader.under_way for loader, _ in training)
        return {"loop": self.loop, "epoch": self.epoch + over, "steps": self._turns.steps + inside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` was called."""
        self.loop, self.epoch = state["loop"], state["epoch"]
        self._loops = min(self._loops, max(self.loop - 1, 0))  # the next loop is the one that was under way
        self._turns.place(state["steps"])


@dataclass(frozen=True)
class Own:
    """What each worker has for itself: where its random generators stand, what its strategy has kept, and optimizers that differ."""

    randomness: Randomness
    sync: Sync
    optimizers: list[Optimizer]

    def dumps(self) -> bytes:
        """All of it."""
        apart = [optimizer.state_dict() for optimizer in self.optimizers] if self.sync.apart else []
        return pack({"randomness": self.randomness.state_dict(), "sync": self.sync.state_dict(), "optimizers": apart}).dumps()

    def load(self, rank: int, found: Mapping[int, Snapshot]) -> None:
        """Go on from what was found, of each worker that there was."""
        states = {other: snapshot.unpack() for other, snapshot in found.items()}
        if rank in states:
            self.randomness.load_state_dict(states[rank]["randomness"])
            for optimizer, state in zip(self.optimizers, states[rank]["optimizers"], strict=False):
                optimizer.load_state_dict(state)
        self.sync.adopt([states[other]["sync"] for other in sorted(states)])


def save(state: Versioned, own: Own, agreement: Agreement, group: Group, folder: Path, *, step: int, keep: int) -> Path:
    """Write a checkpoint of `state`, and of `own` for each worker, into `folder`; gives its path, on all workers."""
    own.sync.converge()
    theirs = _collect(own.dumps(), agreement, group)

    def write() -> bytes:
        owns = {rank: loads(body) for rank, body in enumerate(theirs)}
        return str(checkpoint.save(folder, state.snapshot(copy=False), step, own=owns, keep=keep)).encode()

    return Path(agreement.tell("run.save, written", write).decode())


def resume(
    state: Versioned, own: Own, agreement: Agreement, group: Group, folders: Sequence[Path], *, say: Callable[[str], None]
) -> Path | None:
    """Become the newest whole checkpoint of the first folder that has any, which the first worker reads; its path, or None."""
    found: list[checkpoint.Checkpoint] = []

    def read() -> bytes:
        folder = next((folder for folder in folders if checkpoint.newest(folder)), None)
        if folder is None:
            return bytes(msgpack.packb(None))
        found.append(checkpoint.load(folder, say=say))
        return bytes(msgpack.packb([str(found[0].path), sorted(found[0].own)]))

    head = msgpack.unpackb(agreement.tell("run.resume", read))
    if head is None:
        return None
    bodies = [found[0].snapshot, *(found[0].own[rank] for rank in head[1])] if found else [None] * (1 + len(head[1]))
    snapshots = [_hand_out(body, agreement, group) for body in bodies]
    state.restore(snapshots[0])
    own.load(group.rank, dict(zip(head[1], snapshots[1:], strict=True)))
    if group.size > len(head[1]):
        say(f"the checkpoint was written by {len(head[1])} workers: the random generators of the others go on as they are")
    return Path(head[0])


def _collect(mine: bytes, agreement: Agreement, group: Group) -> list[bytes]:
    """Every worker's bytes, on the first one; nothing elsewhere."""
    lengths = [int.from_bytes(answer, "little") for answer in agreement.meet("run.save", len(mine).to_bytes(8, "little"))]
    first, body = group.rank == 0, torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    found = {rank: torch.empty(length, dtype=torch.uint8) for rank, length in enumerate(lengths) if first and rank}
    group.exchange([] if first else [(0, body)], list(found.items())).wait()
    return [mine, *(tensor.numpy().tobytes() for tensor in found.values())] if first else []


def _hand_out(body: Snapshot | None, agreement: Agreement, group: Group) -> Snapshot:
    """The first worker's snapshot on all workers."""
    data = body.dumps() if body is not None else b""
    nbytes = int.from_bytes(agreement.tell("run.resume, size", lambda: len(data).to_bytes(8, "little")), "little")
    if group.size == 1:
        assert body is not None
        return body
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(nbytes, dtype=torch.uint8)
    group.broadcast(buffer, name="run.resume").wait()
    return body if body is not None else loads(buffer.numpy().tobytes())
