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

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import msgpack
import torch
from torch import Tensor

from paceline.codec.auto import auto
from paceline.codec.codec import Codec, plain, to_codec
from paceline.codec.coding import Coding, exact
from paceline.comm.agreement import Agreement
from paceline.comm.bucket_layout import (
    BucketShape,
    make_sparse_gradient,
    scale_in_place,
)
from paceline.errors import Mismatch, UsageError
from paceline.formatting import format_as_call
from paceline.sync.base import Slot, check_strategy
from paceline.sync.compressed import CodecOptions, CompressedExchange
from paceline.sync.context import SyncContext
from paceline.sync.gradient_buckets import LATE, SPARSE, USED, GradientBuckets
from paceline.sync.routes import Reducer, Via, find_reducer_maker

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

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        find_reducer_maker(self.via)  # raises for an unknown name
        if self.codec == "auto":
            object.__setattr__(self, "codec", auto())
        if self._may_be_coded and self.via not in CODED:
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
    def _may_be_coded(self) -> bool:
        """Whether gradients are coded, or may come to be."""
        if isinstance(self.codec, str):
            raise UsageError(
                f"codec={self.codec!r} is unknown; as a string there is 'auto', else give a codec "
                "such as int8()"
            )
        return isinstance(self.codec, auto) or not isinstance(to_codec(self.codec), plain)

    def begin(self, context: SyncContext) -> AllReduceSync:
        if context.cut_axes and isinstance(self.codec, auto):
            raise UsageError(
                f"{self!r}: codec='auto' decides by measured times, and each part of a cut model "
                "would decide by itself; name the codec"
            )
        coded = None
        if self._may_be_coded and not isinstance(self.codec, str):
            coded = CompressedExchange(context, self.codec, hosts=self.via != "native")
        return AllReduceSync(
            context,
            find_reducer_maker(self.via, coded=coded is not None),
            int(self.bucket_mb * 1e6),
            coded,
        )


class AllReduceSync:
    """The running side of `AllReduce`.

    Invariants: before the first backward has ended there are no buckets, `_early` has its dense
    gradients, and `_order` their slots in the order in which they came. `_flags` has what happened
    to each slot in this backward (USED, SPARSE, LATE). `_sparse` and `_late` have gradients that
    are exchanged at its end, by themselves.
    """

    replicas_diverge = False
    exchanges_in_backward = True

    def __init__(
        self,
        context: SyncContext,
        reducing: Callable[[SyncContext], Reducer],
        limit: int,
        coded: CompressedExchange | None,
    ) -> None:
        self._context, self._reducing, self._limit, self._coded = context, reducing, limit, coded
        self._reducer = reducing(context)
        self._buckets = GradientBuckets(context, self._reducer, coded)
        self._slots: list[Slot] = []
        self._shapes: list[BucketShape] = []
        self._kinds: list[CodecOptions | None] = []
        self._flags = bytearray()
        self._all_used = b""  # the flags of a backward that reaches all parameters once
        self._order: list[int] = []
        self._early: dict[int, Tensor] = {}
        self._sparse: dict[int, Tensor] = {}
        self._late: dict[int, Tensor] = {}
        self._moving: Any = None  # the layout of a `regroup` under way

    # ---- layout

    def attach(self, slots: Sequence[Slot]) -> None:
        self._buckets.release_memory()
        self._slots = list(slots)
        self._kinds = [
            None if self._coded is None else self._coded.choose_codecs(slot) for slot in slots
        ]
        self._shapes = [
            BucketShape.of_parameter(slot.parameter)._replace(kind=_bucket_kind(slot, kind))
            for slot, kind in zip(slots, self._kinds, strict=True)
        ]
        self._flags = bytearray(len(slots))
        self._all_used = bytes([USED]) * len(slots)
        self._order.clear()

    def _lay_out(self, order: Sequence[int], sparse: set[int]) -> None:
        """Make the buckets, in the order of the first worker's first backward."""
        self._buckets.lay_out(
            self._slots, self._shapes, self._kinds, order=order, sparse=sparse, limit=self._limit
        )
        self._flags = bytearray(len(self._slots))

    def _rewind(self) -> None:
        self._buckets.forget_backward()
        self._flags = bytearray(len(self._slots))

    # ---- while backward runs

    def take_gradient(self, number: int, grad: Tensor, scale: float) -> None:
        if grad.is_sparse:
            self._take_sparse(number, grad, scale)
            return
        flags, buckets = self._flags, self._buckets
        again = flags[number] & USED
        flags[number] |= USED
        if not buckets.writing:
            if not buckets.layout:
                self._take_early(number, scale_in_place(grad, scale), again=bool(again))
                return
            buckets.begin_writing()
        home = buckets.home[number]
        if again or home is None:
            self._take_again(number, scale_in_place(grad, scale))
            return
        buckets.put_gradient(home, grad, scale)

    def overwrites(self, number: int, grad: Tensor) -> bool:
        return self._buckets.overwrites(number, grad)

    def _take_early(self, number: int, value: Tensor, *, again: bool) -> None:
        """Keep a gradient of the first backward, which shows the order of the buckets."""
        if again:
            self._early[number].add_(value)
        else:
            self._early[number] = value
            self._order.append(number)

    def _take_again(self, number: int, value: Tensor) -> None:
        """Take a parameter that comes a second time in one backward, or dense after being sparse.

        Reentrant checkpoints that share a parameter bring it twice.
        """
        if not self._buckets.add_again(number, value):
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

    def end_backward(self, where: str) -> list[tuple[int, Tensor]]:
        """End the outermost backward of this worker."""
        # All workers agree on the slots that any of them has used, and so on the buckets to send.
        flags, buckets = self._agree(where), self._buckets
        buckets.finish_backward(self._flags, flags)
        # without buckets there are no homes
        means = {
            number: home[1]
            for number, (flag, home) in enumerate(zip(flags, buckets.home, strict=False))
            if flag & USED and home is not None
        }
        # Gradients without a place in a bucket follow one by one, in the order of the slots.
        for number, flag in enumerate(flags) if max(flags, default=0) > USED else ():
            if flag & LATE:
                total = self._sum_late(number)
                means[number] = means[number].add_(total) if number in means else total
            if flag & SPARSE:
                total = self._sum_sparse(number)
                means[number] = means[number].add_(total) if number in means else total
        self._flags = bytearray(len(self._slots))
        return list(means.items())

    def _agree(self, where: str) -> Sequence[int]:
        """Agree with all workers on what was used, and on the layout the first time.

        Returns the flags of all workers together. A body is empty if this worker has used each
        parameter once, as is so in nearly every step.
        """
        own = bytes(self._flags)
        first = not self._buckets.layout
        layout = [self._order, _digest_names(self._slots)] if first else [None, None]
        body = b"" if own == self._all_used and not first else msgpack.packb([own, *layout])
        answers = self._context.agreement.meet(
            "backward", body, where="" if where == "backward" else where
        )
        if not first and not any(answers):
            return own
        workers = [
            msgpack.unpackb(answer) if answer else (self._all_used, None, None)
            for answer in answers
        ]
        if any(names != workers[0][2] for _, _, names in workers):
            _refuse_different_parameters(self._slots, self._context.agreement)
        union = bytearray(len(own))
        for flags, _, _ in workers:
            for number, flag in enumerate(flags):
                union[number] |= flag
        if first and any(union):
            order: list[int] = next((order for _, order, _ in workers if order), [])
            self._place_early(order, union, own)
        return list(union)

    def _place_early(self, order: list[int], union: bytearray, own: bytes) -> None:
        """Lay buckets out at the end of the first backward, and put its gradients there."""
        self._lay_out(order, {number for number, flag in enumerate(union) if flag & SPARSE})
        self._flags = bytearray(own)
        for number, grad in self._early.items():
            if (home := self._buckets.home[number]) is not None:
                home[1].copy_(grad)
            else:
                self._flags[number] |= LATE
                self._late[number] = grad
        self._early.clear()
        # dense on one worker, sparse on another: the dense part goes by itself
        for number, flag in enumerate(union):
            union[number] |= LATE if flag & USED and flag & SPARSE else 0

    def _sum_late(self, number: int) -> Tensor:
        late = self._late.pop(number, None)
        addend = torch.zeros_like(self._slots[number].parameter) if late is None else late
        flat = addend.detach().contiguous().view(-1)
        return self._reducer.all_reduce(flat, f"late {number}").wait().view(addend.shape)

    def _sum_sparse(self, number: int) -> Tensor:
        parameter = self._slots[number].parameter
        own = self._sparse.pop(number, None)
        if own is None:
            nothing = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            own = make_sparse_gradient(
                nothing, parameter.new_empty((0, *parameter.shape[1:])), parameter.shape
            )
        own = own.coalesce()
        indices = self._context.group.all_gather(
            own.indices().t().contiguous(), name=f"sparse {number} indices"
        ).wait()
        values = self._context.group.all_gather(own.values(), name=f"sparse {number} values").wait()
        return make_sparse_gradient(
            torch.cat(indices).t(), torch.cat(values), parameter.shape
        ).coalesce()

    # ---- the rest of the life of a strategy

    def commit(self) -> None:
        if self._coded is not None:
            self._coded.commit()

    def abort(self) -> None:
        self._early.clear()
        self._sparse.clear()
        self._late.clear()
        self._order.clear()
        if self._coded is not None:
            self._coded.abort()
        self._rewind()

    def join_info(self) -> Any:
        """Return the order of parameters in coded buckets."""
        if self._coded is None or not self._buckets.layout:
            return self._moving
        order = [number for bucket in self._buckets.layout for number in bucket.members]
        return {"order": order, "coded": self._coded.join_info()}

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Make new buckets, of the same parameters if a codec has kept something of them."""
        # another worker may leave before there are buckets again
        self._moving = layout = self.join_info() if layout is None else layout
        self._context, self._reducer = context, self._reducing(context)
        self._buckets.move_to_group(context, self._reducer)
        self._early.clear()
        self._sparse.clear()
        self._late.clear()
        if self._coded is not None:
            self._coded.regroup()
        self.attach(self._slots)
        if self._coded is not None and layout is not None:
            states = self._coded.all_states
            self._coded.load_join_info(layout["coded"])
            self._lay_out(layout["order"], set(range(len(self._slots))) - {*layout["order"]})
            self._coded.restore_states(states)
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
        self._buckets.release_memory()
        self._reducer.close()
        if self._coded is not None:
            self._coded.close()

    def state_dict(self) -> dict[str, Any]:
        """Order of parameters in buckets, parameters without a place, and residuals of the codec.

        An exact mean has no state.
        """
        if self._coded is None or not self._buckets.layout:
            return {}
        order = [
            self._slots[number].name for bucket in self._buckets.layout for number in bucket.members
        ]
        apart = [
            slot.name
            for slot, home in zip(self._slots, self._buckets.home, strict=True)
            if home is None
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
        self._buckets.release_memory()
        self._lay_out(
            order,
            {*numbers.values()} - {*order}
            if apart is None
            else {numbers[name] for name in apart if name in numbers},
        )
        self._coded.load_state_dicts([state["coded"] for state in found])


def _bucket_kind(slot: Slot, codecs: CodecOptions | None) -> Hashable:
    """Slots that share buckets.

    A bucket that is coded is alike on all workers only if all of it is replicated alike.
    """
    return None if codecs is None else (codecs, slot.shard)


def _digest_names(slots: Sequence[Slot]) -> bytes:
    return hashlib.sha256("\n".join(slot.name for slot in slots).encode()).digest()


def _refuse_different_parameters(slots: Sequence[Slot], agreement: Agreement) -> NoReturn:
    """Raise an error that says which parameters the workers don't have in common. Collective."""
    names = [slot.name for slot in slots]
    workers = [
        msgpack.unpackb(answer) for answer in agreement.meet("parameters", msgpack.packb(names))
    ]
    for rank, theirs in enumerate(workers):
        odd = sorted({*theirs} ^ {*workers[0]})
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
