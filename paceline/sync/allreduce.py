"""Synchronous data parallelism: the mean of all gradients, in buckets sent during backward.

    backward:   g9 g8 | g7 g6 g5 | g4 ...  g1 g0 |
    bucket 0:         |---- exchange ----|
    bucket 1:                    |---- exchange ----|
    end:                                         | who used what? | the rest | p.grad |

The buckets that a rank hands over early depend on the parameters that its own backward touched. At
the end the ranks agree, on a separate channel, on the list of buckets. So every rank exchanges the
same buckets in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack
import torch
from torch import Tensor

from paceline.codec.auto import auto
from paceline.codec.codec import Codec, lift, plain
from paceline.codec.coding import Coding, exact
from paceline.comm.bucket_layout import (
    Bucket,
    BucketShape,
    build_buckets,
    cut_runs,
    find_small_stretches,
    make_sparse_gradient,
    put_scaled,
    scale_in_place,
)
from paceline.comm.group_protocol import Work
from paceline.errors import Mismatch, UsageError
from paceline.formatting import spell
from paceline.sync.base import Slot, check_strategy
from paceline.sync.bucket_memory import BucketMemory
from paceline.sync.compressed import CompressedExchange, Kind
from paceline.sync.context import SyncContext
from paceline.sync.routes import Reducer, Via, reducer

FIRST_MB = 1.0  # the first bucket is small, so that the exchange starts early
# elements above which a gradient is copied when it comes; smaller ones by the bucket
LARGE = 16 << 10
USED, SPARSE, LATE = 1, 2, 4
CODED = ("auto", "native")  # the ways that a codec can have


@dataclass(frozen=True)
class AllReduce:
    """Give every replica the same step: the mean gradient over the global batch.

    >>> pl.start(sync=pl.AllReduce(codec="auto"))  # or: paceline run --sync 'AllReduce(codec="auto")'

    When `backward()` returns, `p.grad` is the mean over the global batch, weighted by samples.
    `optimizer.step()` is torch's own. Gradients are sent in buckets while backward runs.

    Args:
        via: Route of the gradients. "auto" (default) uses shared memory inside a host, sends one
            copy per host between hosts, and uses NCCL between GPUs; with a measured cluster it
            chooses by its links (see `start`). "native" is Gloo or NCCL over all ranks. A schedule
            may be named: "direct", "owners", "ring", "tree", "halving-doubling", "hierarchical" or
            "uneven" (chunks by measured links).
        bucket_mb: Size of a bucket in MB. Default: 8.
        codec: How gradients are written on the wire, such as `int8()` or
            `error_feedback(topk(0.01))`. `p.grad` is then what has arrived, the same on all
            workers. "auto" begins with exact sums and takes a codec if that is faster (see `auto`).
            Sums inside a host stay exact, unless all workers are on one host or `via="native"`.
            Default: `exact()`.

    Raises:
        UsageError: No such route, no size above 0, or a codec together with a schedule.
    """  # noqa: E501

    via: Via = "auto"
    bucket_mb: float = 8.0
    codec: Codec | Coding | auto | Literal["auto"] = field(default_factory=exact)

    __repr__ = spell

    def __post_init__(self) -> None:
        reducer(self.via)  # raises for an unknown name
        if self.codec == "auto":
            object.__setattr__(self, "codec", auto())
        if self._lossy and self.via not in CODED:
            raise UsageError(
                f"{self!r}: a codec has a way of its own to sum, so via={self.via!r} can't be "
                "honoured; leave via out (exact inside a "
                "host, coded between hosts), or say via='native' (coded between all workers)"
            )
        if not self.bucket_mb > 0:
            raise UsageError(
                f"bucket_mb={self.bucket_mb} is not a size; "
                "give megabytes above 0, e.g. bucket_mb=8"
            )

    @property
    def _lossy(self) -> bool:
        """Whether gradients are coded, or may come to be."""
        if isinstance(self.codec, str):
            raise UsageError(
                f"codec={self.codec!r} is unknown; as a string there is 'auto', else give a codec "
                "such as int8()"
            )
        return isinstance(self.codec, auto) or not isinstance(lift(self.codec), plain)

    def begin(self, context: SyncContext) -> AllReduceSync:
        if context.cut_axes and isinstance(self.codec, auto):
            raise UsageError(
                f"{self!r}: codec='auto' decides by measured times, and each part of a cut model "
                "would decide by itself; name the codec"
            )
        coded = None
        if self._lossy and not isinstance(self.codec, str):
            coded = CompressedExchange(context, self.codec, hosts=self.via != "native")
        return AllReduceSync(
            context, reducer(self.via, coded=coded is not None), int(self.bucket_mb * 1e6), coded
        )


class AllReduceSync:
    """The running side of `AllReduce`."""

    replicas_diverge = False
    exchanges_in_backward = True

    def __init__(
        self,
        context: SyncContext,
        reducing: Callable[[SyncContext], Reducer],
        limit: int,
        coded: CompressedExchange | None = None,
    ) -> None:
        self._context, self._reducing, self._limit, self._coded = context, reducing, limit, coded
        self._reducer = reducing(context)
        self._slots: list[Slot] = []
        self._shapes: list[BucketShape] = []
        self._kinds: list[Kind | None] = []
        self._buckets: list[Bucket] = []
        # of each slot: its bucket and its view there (None: sparse, it has none)
        self._home: list[tuple[int, Tensor] | None] = []
        self._missing: list[int] = []  # of each bucket: members that have not come
        # of each bucket: (view, gradient, scale) to be copied
        self._small: list[list[tuple[Tensor, Tensor, float]]] = []
        # of each bucket: how many small members it has, and where they lie
        self._smalls: list[tuple[int, list[slice]]] = []
        self._works: list[Work[Tensor] | None] = []
        self._shelves: BucketMemory | None = None  # where buckets lie
        self._writing = False  # buckets are being written, in memory that nobody holds
        self._begun: list[int] = []  # when each bucket left, nanoseconds
        self._next = 0
        self._flags = bytearray()
        self._order: list[int] = []
        self._held: dict[int, Tensor] = {}
        self._sparse: dict[int, Tensor] = {}
        self._late: dict[int, Tensor] = {}
        # buckets whose members may come more than once in a backward
        self._patient: set[int] = set()
        self._full = b""
        self._moving: Any = None  # the layout of a `regroup` under way

    # ---- layout

    def attach(self, slots: Sequence[Slot]) -> None:
        self._release()
        self._slots = list(slots)
        self._kinds = [None if self._coded is None else self._coded.kind(slot) for slot in slots]
        self._shapes = [
            BucketShape.of_parameter(slot.parameter)._replace(kind=_kind(slot, kind))
            for slot, kind in zip(slots, self._kinds, strict=True)
        ]
        self._flags = bytearray(len(slots))
        self._full = bytes([USED]) * len(slots)
        self._order.clear()

    def _lay_out(self, order: Sequence[int], sparse: set[int]) -> None:
        """Make the buckets, in the order of the first worker's first backward.

        Sparse gradients have no place in them.
        """
        seen = {*order, *sparse}
        whole = [
            *(n for n in order if n not in sparse),
            *(n for n in reversed(range(len(self._slots))) if n not in seen),
        ]
        runs = cut_runs(self._shapes, whole, self._limit, int(min(FIRST_MB * 1e6, self._limit)))
        self._buckets = build_buckets(self._shapes, runs, self._empty)
        self._smalls = [
            (
                sum(view.numel() < LARGE for view in bucket.views),
                find_small_stretches(bucket, LARGE),
            )
            for bucket in self._buckets
        ]
        self._home = [None] * len(self._slots)
        self._patient.clear()
        self._shelves = BucketMemory(
            self._buckets, self._home, [slot.parameter for slot in self._slots], self._reducer
        )
        if self._coded is not None:
            self._coded.lay_out(
                self._buckets, [slot.name for slot in self._slots], self._shapes, self._kinds
            )
        self._rewind()

    def _empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return (
            self._reducer.empty(numel, dtype)
            if device.type == "cpu"
            else torch.empty(numel, dtype=dtype, device=device)
        )

    def _rewind(self) -> None:
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._small = [[] for _ in self._buckets]
        self._works = [None] * len(self._buckets)
        self._begun = [0] * len(self._buckets)
        self._next = 0
        self._writing = False
        self._flags = bytearray(len(self._slots))

    def _release(self) -> None:
        if self._shelves is not None:
            self._shelves.close()
        self._buckets, self._shelves = [], None

    # ---- while backward runs

    def ready(self, number: int, grad: Tensor, scale: float) -> None:
        if grad.is_sparse:
            self._take_sparse(number, grad, scale)
            return
        again = self._flags[number] & USED
        self._flags[number] |= USED
        if not self._writing:
            if not self._buckets:
                value = scale_in_place(grad, scale)
                self._held[number] = self._held[number].add_(value) if again else value
                if not again:
                    self._order.append(number)
                return
            self._write()
        home = self._home[number]
        if again or home is None:
            self._once_more(number, scale_in_place(grad, scale))
            return
        index, view = home
        if grad.numel() >= LARGE:
            put_scaled(view, grad, scale)
        else:
            self._small[index].append((view, grad, scale))
        self._missing[index] -= 1
        if not self._missing[index]:
            self._leave()
        elif self._next and (work := self._works[self._next - 1]) is not None:
            work.done()  # pushes it forward

    def overwrites(self, number: int, grad: Tensor) -> bool:
        self._write()
        home = self._home[number] if self._shelves is not None else None
        return home is not None and home[1] is grad

    def _write(self) -> None:
        """Choose unused memory for the buckets that are about to be written."""
        if not self._writing and self._shelves is not None:
            self._shelves.renew()
            self._writing = True

    def _leave(self) -> None:
        """Send the buckets that are full, in order."""
        while (
            self._next < len(self._buckets)
            and not self._missing[self._next]
            and self._next not in self._patient
        ):
            self._send(self._next)
            self._next += 1

    def _send(self, index: int) -> None:
        self._fill(index)
        self._begun[index] = time.perf_counter_ns()
        flat, name = self._buckets[index].flat, f"bucket {index}"
        if self._coded is not None and self._coded.takes(index):
            self._works[index] = self._coded.all_reduce(index, flat, name)
        else:
            self._works[index] = self._reducer.all_reduce(
                flat, name, soon=index == len(self._buckets) - 1
            )

    def _fill(self, index: int) -> None:
        small = self._small[index]
        if not small:
            return
        views, grads, scales = zip(*small, strict=True)
        torch._foreach_copy_(views, grads)
        if scales.count(scales[0]) != len(scales):
            for view, grad, scale in small:
                put_scaled(view, grad, scale)
        elif scales[0] == 0.0:
            torch._foreach_zero_(views)
        elif scales[0] != 1.0 and len(small) == self._smalls[index][0]:
            # all at once, as each by itself takes long
            for stretch in self._smalls[index][1]:
                self._buckets[index].flat[stretch].mul_(scales[0])
        elif scales[0] != 1.0:
            torch._foreach_mul_(views, scales[0])
        small.clear()

    def _once_more(self, number: int, value: Tensor) -> None:
        """Take a parameter that comes a second time in one backward, or dense after being sparse.

        Reentrant checkpoints that share a parameter bring it twice.
        """
        home = self._home[number]
        if home is not None:
            self._patient.add(home[0])  # from now on its bucket waits for the end
        if home is not None and self._works[home[0]] is None:
            self._fill(home[0])
            home[1].add_(value)
        else:
            self._flags[number] |= LATE
            self._late[number] = self._late[number].add_(value) if number in self._late else value

    def _take_sparse(self, number: int, grad: Tensor, scale: float) -> None:
        value = (
            grad * scale
            if scale
            else make_sparse_gradient(grad._indices()[:, :0], grad._values()[:0], grad.shape)
        )
        self._flags[number] |= SPARSE
        self._sparse[number] = self._sparse[number].add_(value) if number in self._sparse else value

    # ---- at its end

    def backward_done(self, where: str) -> list[tuple[int, Tensor]]:
        flags = self._meet(where)
        if not self._writing:
            self._write()
        for index in range(self._next, len(self._buckets)):
            bucket = self._buckets[index]
            if not any(flags[number] & USED for number in bucket.members):
                continue
            self._fill(index)
            for number, view in zip(bucket.members, bucket.views, strict=True):
                if not self._flags[number] & USED:
                    view.zero_()
            self._send(index)
        begun = [
            (index, self._begun[index])
            for index, work in enumerate(self._works)
            if work is not None
        ]
        with contextlib.nullcontext() if self._coded is None else self._coded.awaited(begun):
            for index, work in enumerate(self._works):
                if work is not None:
                    work.wait()
                    self._context.trace.record(
                        f"bucket {index}", "bucket", self._begun[index], time.perf_counter_ns()
                    )
        # without buckets there are no homes
        homes = enumerate(zip(flags, self._home, strict=False))
        results = {
            number: home[1] for number, (flag, home) in homes if flag & USED and home is not None
        }
        for number, flag in enumerate(flags) if max(flags, default=0) > USED else ():
            if flag & LATE:
                total = self._sum_late(number)
                results[number] = results[number].add_(total) if number in results else total
            if flag & SPARSE:
                total = self._sum_sparse(number)
                results[number] = results[number].add_(total) if number in results else total
        self._rewind()
        return list(results.items())

    def _meet(self, where: str) -> list[int]:
        """Agree with all workers on what was used, and on the layout the first time."""
        whole = bytes(self._flags)
        first = not self._buckets
        layout = [self._order, self._layout()] if first else [None, None]
        body = b"" if whole == self._full and not first else msgpack.packb([whole, *layout])
        answers = self._context.agreement.meet(
            "backward", body, where="" if where == "backward" else where
        )
        if not first and not any(answers):
            return list(whole)
        union = bytearray(len(whole))
        order: list[int] | None = None
        parts = [
            msgpack.unpackb(answer) if answer else (self._full, None, None) for answer in answers
        ]
        if any(names != parts[0][2] for _, _, names in parts):
            self._tell_apart()
        for flags, theirs, _ in parts:
            for number, flag in enumerate(flags):
                union[number] |= flag
            if order is None and theirs:
                order = theirs
        if first and any(union):
            self._lay_out(order or [], {n for n, flag in enumerate(union) if flag & SPARSE})
            self._flags = bytearray(whole)
            for number, grad in self._held.items():
                if (home := self._home[number]) is not None:
                    home[1].copy_(grad)
                else:
                    self._flags[number] |= LATE
                    self._late[number] = grad
            # dense here, sparse there: the dense part goes by itself
            for number in range(len(union)):
                union[number] |= LATE if union[number] & USED and union[number] & SPARSE else 0
            self._held.clear()
        return list(union)

    def _layout(self) -> bytes:
        return hashlib.sha256("\n".join(slot.name for slot in self._slots).encode()).digest()

    def _tell_apart(self) -> None:
        """Raise an error that says which parameters the workers don't have in common."""
        names = [slot.name for slot in self._slots]
        found = [
            msgpack.unpackb(answer)
            for answer in self._context.agreement.meet("parameters", msgpack.packb(names))
        ]
        for rank, theirs in enumerate(found):
            odd = sorted({*theirs} ^ {*found[0]})
            if odd:
                has, lacks = (rank, 0) if odd[0] in theirs else (0, rank)
                raise Mismatch(
                    f"workers train different parameters: {odd[0]} is trained on rank {has} and "
                    f"frozen on rank {lacks}"
                )
        raise Mismatch(
            "workers unfroze the same parameters in different orders; unfreeze them in the same "
            "order on all"
        )

    def _sum_late(self, number: int) -> Tensor:
        late = self._late.pop(number, None)
        addend = torch.zeros_like(self._slots[number].parameter) if late is None else late
        flat = addend.detach().contiguous().view(-1)
        return self._reducer.all_reduce(flat, f"late {number}").wait().view(addend.shape)

    def _sum_sparse(self, number: int) -> Tensor:
        parameter = self._slots[number].parameter
        mine = self._sparse.pop(number, None)
        if mine is None:
            nothing = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            mine = make_sparse_gradient(
                nothing, parameter.new_empty((0, *parameter.shape[1:])), parameter.shape
            )
        mine = mine.coalesce()
        indices = self._context.group.all_gather(
            mine.indices().t().contiguous(), name=f"sparse {number} indices"
        ).wait()
        values = self._context.group.all_gather(
            mine.values(), name=f"sparse {number} values"
        ).wait()
        return make_sparse_gradient(
            torch.cat(indices).t(), torch.cat(values), parameter.shape
        ).coalesce()

    # ---- the rest of the life of a strategy

    def commit(self) -> None:
        if self._coded is not None:
            self._coded.commit()

    def abort(self) -> None:
        self._held.clear()
        self._sparse.clear()
        self._late.clear()
        self._order.clear()
        if self._coded is not None:
            self._coded.abort()
        self._rewind()

    def join_info(self) -> Any:
        """Return the order of parameters in coded buckets."""
        if self._coded is None or not self._buckets:
            return self._moving
        order = [number for bucket in self._buckets for number in bucket.members]
        return {"order": order, "coded": self._coded.join_info()}

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Make new buckets, of the same parameters if a codec has kept something of them."""
        # another worker may leave before there are buckets again
        self._moving = layout = self.join_info() if layout is None else layout
        # in memory of the old group, which Gloo may still write to
        self._buckets, self._shelves = [], None
        self._context, self._reducer = context, self._reducing(context)
        self._held.clear()
        self._sparse.clear()
        self._late.clear()
        if self._coded is not None:
            self._coded.regroup()
        self.attach(self._slots)
        if self._coded is not None and layout is not None:
            states = self._coded.kept
            self._coded.follow(layout["coded"])
            self._lay_out(layout["order"], set(range(len(self._slots))) - {*layout["order"]})
            self._coded.keep(states)
        self._moving = None

    def load_from_peer(self, state: dict[str, Any]) -> None:
        """Take over nothing: residuals begin with zeros, and there is no other state."""

    @property
    def has_unreplicated_state(self) -> bool:
        return self._coded is not None and self._coded.has_unreplicated_state

    def unreplicated_state(self) -> dict[str, Any] | None:
        """Residuals of gradients that a codec has kept."""
        return None if self._coded is None else self._coded.unreplicated_state()

    def load_unreplicated_state(self, state: dict[str, Any], step: int) -> bool:
        return self._coded is not None and self._coded.load_unreplicated_state(state)

    def detach(self) -> None:
        self._release()
        self._reducer.close()
        if self._coded is not None:
            self._coded.close()

    def state_dict(self) -> dict[str, Any]:
        """Order of parameters in buckets, parameters without a place, and residuals of the codec.

        An exact mean has no state.
        """
        if self._coded is None or not self._buckets:
            return {}
        order = [self._slots[number].name for bucket in self._buckets for number in bucket.members]
        apart = [
            slot.name for slot, home in zip(self._slots, self._home, strict=True) if home is None
        ]
        return {"order": order, "sparse": apart, "coded": self._coded.state_dict()}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        found = [state for state in states if state]
        check_strategy("AllReduce", found, "coded")
        if not found:
            return
        if self._coded is None:
            self._context.announce(
                "the checkpoint was written with a codec: "
                "what it had kept of the gradients is dropped"
            )
            return
        numbers = {slot.name: number for number, slot in enumerate(self._slots)}
        # what older checkpoints don't tell is all that is in no bucket
        apart = found[0].get("sparse")
        if apart is None and (
            strange := [name for name in found[0]["order"] if name not in numbers]
        ):
            raise UsageError(
                f"the checkpoint has the gradient of {strange[0]} in a codec, and no such "
                "parameter is trained here"
            )
        order = [numbers[name] for name in found[0]["order"] if name in numbers]
        self._release()
        self._lay_out(
            order,
            {*numbers.values()} - {*order}
            if apart is None
            else {numbers[name] for name in apart if name in numbers},
        )
        self._coded.load_state_dicts([state["coded"] for state in found])


def _kind(slot: Slot, codecs: Kind | None) -> Hashable:
    """Slots that share buckets.

    A bucket that is coded is alike on all workers only if all of it is replicated alike.
    """
    return None if codecs is None else (codecs, slot.shard)
