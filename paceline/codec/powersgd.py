"""PowerSGD: matrices are summed as products of two thin matrices.

Vogels et al. 2019, algorithms 1 and 2. M is this rank's n x m matrix, r the rank of the product:

    P = M Q (n x r)  ->  P summed, made orthonormal  ->  Q = M' P (m x r)  ->  Q summed
    total = P Q'

The next sum begins with the Q of the last one (warm start), so each step of training is one step of
power iteration. All ranks begin with the summed Q, never with their own. Otherwise replicas would
drift apart if the inner codec is lossy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Size, Tensor

from paceline.codec.codec import (
    Codec,
    State,
    Sum,
    Way,
    Wire,
    holds_residual,
    is_finite,
    to_codec,
    where,
)
from paceline.codec.coding import Coding, exact
from paceline.errors import UsageError
from paceline.formatting import format_as_call

SEED = 1909  # of the first Q, the same on every rank


class _MatrixPlace(NamedTuple):
    """The place of a tensor in the flat one, and its shape as a matrix.

    A tensor without a matrix is sent as it is.
    """

    start: int
    stop: int
    matrix: tuple[int, int] | None


@dataclass(frozen=True)
class powersgd:
    """Sums matrices as products of rank `rank`. `inner` is the codec of P and Q.

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.powersgd(rank=4))))

    A tensor with more than two dims becomes a matrix: its first dim against all others. Vectors,
    and matrices that would not become smaller, travel with P as they are. The codec loses so much
    that it needs `error_feedback` around it. On processors of different kinds the products may
    differ in their last bits.
    """

    rank: int
    inner: Codec | Coding = field(default_factory=exact)

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        inner = to_codec(self.inner)
        if isinstance(inner, where):
            raise UsageError(
                f"{self!r}: where chooses between tensors, and P and Q are no tensors of the "
                "model; put it around powersgd"
            )
        if holds_residual(inner.init([Size((2, 2))], torch.device("cpu"))):
            raise UsageError(
                f"{self!r}: the residuals that error_feedback keeps of P and Q mean nothing for "
                "the next ones; "
                "put it around powersgd"
            )
        if self.rank < 1:
            raise UsageError(f"{self!r}: rank is {self.rank}; choose 1 or more")

    @property
    def stages(self) -> int:
        return 2 * to_codec(self.inner).stages

    def choose(self, name: str, shape: Size) -> Codec:
        return self

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        places = self._cut_matrices(shapes)
        # every rank draws the same first Q, on the CPU: other devices draw other numbers
        generator = torch.Generator().manual_seed(SEED)
        numel = sum(place.matrix[1] for place in places if place.matrix) * self.rank
        q = torch.randn(numel, generator=generator, dtype=torch.float32).to(device)
        inner = to_codec(self.inner)
        return {
            "q": q,
            "inner p": inner.init(self._thin_shapes(places, 0), device),
            "inner q": inner.init(self._thin_shapes(places, 1), device),
        }

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        places, inner = self._cut_matrices(shapes), to_codec(self.inner)
        tensors = [x[place.start : place.stop] for place in places]
        # P = M Q. Tensors without a matrix travel among its parts, in their order.
        q = self._thin_views(places, state["q"], 1)
        p = torch.cat(
            [
                (tensor.view(place.matrix) @ q[place]).view(-1) if place.matrix else tensor
                for place, tensor in zip(places, tensors, strict=True)
            ]
        )
        summed_p = yield from inner.sum(p, self._thin_shapes(places, 0), state["inner p"], wire)
        # A sum that isn't finite is so on all ranks: they all leave here, and keep the old state.
        if not is_finite(summed_p.total):
            return Sum(torch.full_like(x, math.nan), lambda y: None, state)
        # P is made orthonormal, then Q = M' P
        basis = {
            place: torch.linalg.qr(view).Q
            for place, view in self._thin_views(places, summed_p.total, 0).items()
        }
        products = [
            (tensor.view(place.matrix).t() @ basis[place]).reshape(-1)
            for place, tensor in zip(places, tensors, strict=True)
            if place.matrix
        ]
        own_q = torch.cat(products) if products else x.new_empty(0)
        summed_q = yield from inner.sum(
            own_q, self._thin_shapes(places, 1), state["inner q"], wire.skip_stages(inner.stages)
        )
        total = torch.empty_like(x)
        self._write_product(places, total, basis, summed_q.total, summed_p.total)

        def settle(y: Tensor) -> None:
            # Only what the inner codec has really sent is subtracted from `y`.
            unsent_q, unsent_p = own_q.clone(), p.clone()
            summed_q.settle(unsent_q)
            summed_p.settle(unsent_p)
            self._write_product(places, y, basis, own_q - unsent_q, p - unsent_p, minus=True)

        return Sum(
            total,
            settle,
            {"q": summed_q.total, "inner p": summed_p.state, "inner q": summed_q.state},
        )

    def _cut_matrices(self, shapes: Sequence[Size]) -> list[_MatrixPlace]:
        ends = list(accumulate(map(math.prod, shapes), initial=0))
        places = []
        for start, stop, shape in zip(ends, ends[1:], shapes, strict=False):
            rows = shape[0] if len(shape) > 1 else 0
            columns = (stop - start) // rows if rows else 0
            # a product has rank * (rows + columns) elements, and is used if these are fewer
            thin = rows * columns > self.rank * (rows + columns)
            places.append(_MatrixPlace(start, stop, (rows, columns) if thin else None))
        return places

    def _thin_shapes(self, places: Sequence[_MatrixPlace], side: int) -> list[Size]:
        """List the shapes of the tensors that travel.

        Side 0: P, and the tensors that are no matrices. Side 1: Q.
        """
        sizes = []
        for place in places:
            if place.matrix:
                sizes.append(Size((place.matrix[side], self.rank)))
            elif side == 0:
                sizes.append(Size((place.stop - place.start,)))
        return sizes

    def _thin_views(
        self, places: Sequence[_MatrixPlace], flat: Tensor, side: int
    ) -> dict[_MatrixPlace, Tensor]:
        """View the thin matrices of one side in `flat`, by the place of their matrix."""
        views, offset = {}, 0
        for place in places:
            if place.matrix:
                rows = place.matrix[side]
                views[place] = flat[offset : offset + rows * self.rank].view(rows, self.rank)
                offset += rows * self.rank
            elif side == 0:
                offset += place.stop - place.start
        return views

    def _write_product(
        self,
        places: Sequence[_MatrixPlace],
        out: Tensor,
        basis: dict[_MatrixPlace, Tensor],
        q: Tensor,
        p: Tensor,
        *,
        minus: bool = False,
    ) -> None:
        """Write the result into `out`, or subtract it from `out` if `minus`.

        Matrices become P Q'. The other tensors are copied from `p`, which they travelled with.
        """
        q_views, offset = self._thin_views(places, q, 1), 0
        for place in places:
            target = out[place.start : place.stop]
            if place.matrix:
                product = target.view(place.matrix)
                torch.addmm(
                    product,
                    basis[place],
                    q_views[place].t(),
                    beta=int(minus),
                    alpha=-1 if minus else 1,
                    out=product,
                )
                offset += place.matrix[0] * self.rank
            else:
                plain = p[offset : offset + place.stop - place.start]
                target.sub_(plain) if minus else target.copy_(plain)
                offset += place.stop - place.start
