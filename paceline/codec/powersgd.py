"""Low rank: matrices are summed as the product of two thin ones (PowerSGD).

Vogels et al. 2019, algorithms 1 and 2. M is this rank's n x m matrix:

    P = M Q (n x r)  ->  P summed, made orthonormal  ->  Q = M' P (m x r)  ->  Q summed
    total = P Q'

The next sum begins with the Q of the last one (warm start): one step of power iteration per step of
training. Each rank's next Q is the summed one, never its own. Otherwise replicas would drift apart
with a lossy coding inside.
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
    """Where a tensor lies in the flat one, and its matrix; without one it is sent as it is."""

    start: int
    stop: int
    matrix: tuple[int, int] | None


@dataclass(frozen=True)
class powersgd:
    """Sums matrices as products of rank `rank`; `inner` is the codec of P and Q.

    >>> pl.start(sync=pl.AllReduce(codec=pl.error_feedback(pl.powersgd(rank=4))))

    A tensor of more dimensions is a matrix of its first one against all others. Vectors, and
    matrices that would not become smaller, travel with P as they are. It loses so much that it
    needs `error_feedback` around it. On processors of different kinds the products may differ in
    their last bits.
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
                f"{self!r}: what error_feedback keeps of P and Q means nothing for the next ones; "
                "put it around powersgd"
            )
        if self.rank < 1:
            raise UsageError(f"{self!r}: rank is {self.rank}, and has to be 1 or more")

    @property
    def stages(self) -> int:
        return 2 * to_codec(self.inner).stages

    def choose(self, name: str, shape: Size) -> Codec:
        return self

    def init(self, shapes: Sequence[Size], device: torch.device) -> State:
        cuts = self._cut_matrices(shapes)
        generator = torch.Generator().manual_seed(SEED)
        numel = sum(cut.matrix[1] for cut in cuts if cut.matrix) * self.rank
        q = torch.randn(numel, generator=generator, dtype=torch.float32).to(device)
        inner = to_codec(self.inner)
        return {
            "q": q,
            "inner p": inner.init(self._thin_shapes(cuts, 0), device),
            "inner q": inner.init(self._thin_shapes(cuts, 1), device),
        }

    def sum(self, x: Tensor, shapes: Sequence[Size], state: State, wire: Wire) -> Way:
        cuts, inner = self._cut_matrices(shapes), to_codec(self.inner)
        whole = [x[cut.start : cut.stop] for cut in cuts]
        q = self._thin_views(cuts, state["q"], 1)
        p = torch.cat(
            [
                (part.view(cut.matrix) @ q[cut]).view(-1) if cut.matrix else part
                for cut, part in zip(cuts, whole, strict=True)
            ]
        )
        summed = yield from inner.sum(p, self._thin_shapes(cuts, 0), state["inner p"], wire)
        if not is_finite(summed.total):  # on all ranks
            return Sum(torch.full_like(x, math.nan), lambda y: None, state)
        basis = {
            cut: torch.linalg.qr(view).Q
            for cut, view in self._thin_views(cuts, summed.total, 0).items()
        }
        mine = [
            (part.view(cut.matrix).t() @ basis[cut]).reshape(-1)
            for cut, part in zip(cuts, whole, strict=True)
            if cut.matrix
        ]
        back = torch.cat(mine) if mine else x.new_empty(0)
        turned = yield from inner.sum(
            back, self._thin_shapes(cuts, 1), state["inner q"], wire.skip_stages(inner.stages)
        )
        total = torch.empty_like(x)
        self._write_product(cuts, total, basis, turned.total, summed.total)

        def settle(y: Tensor) -> None:
            left, rest = back.clone(), p.clone()
            turned.settle(left)
            summed.settle(rest)
            self._write_product(cuts, y, basis, back - left, p - rest, minus=True)

        return Sum(
            total, settle, {"q": turned.total, "inner p": summed.state, "inner q": turned.state}
        )

    # ---- layout

    def _cut_matrices(self, shapes: Sequence[Size]) -> list[_MatrixPlace]:
        ends = list(accumulate(map(math.prod, shapes), initial=0))
        cuts = []
        for start, stop, shape in zip(ends, ends[1:], shapes, strict=False):
            rows = shape[0] if len(shape) > 1 else 0
            columns = (stop - start) // rows if rows else 0
            thin = rows * columns > self.rank * (rows + columns)
            cuts.append(_MatrixPlace(start, stop, (rows, columns) if thin else None))
        return cuts

    def _thin_shapes(self, cuts: Sequence[_MatrixPlace], side: int) -> list[Size]:
        """Return the shapes of the tensors that travel: P with the tensors that are no matrices
        (side 0), or Q (side 1).
        """
        sizes = []
        for cut in cuts:
            if cut.matrix:
                sizes.append(Size((cut.matrix[side], self.rank)))
            elif side == 0:
                sizes.append(Size((cut.stop - cut.start,)))
        return sizes

    def _thin_views(
        self, cuts: Sequence[_MatrixPlace], flat: Tensor, side: int
    ) -> dict[_MatrixPlace, Tensor]:
        """Return the thin matrices in `flat`."""
        views, at = {}, 0
        for cut in cuts:
            if cut.matrix:
                rows = cut.matrix[side]
                views[cut] = flat[at : at + rows * self.rank].view(rows, self.rank)
                at += rows * self.rank
            elif side == 0:
                at += cut.stop - cut.start
        return views

    def _write_product(
        self,
        cuts: Sequence[_MatrixPlace],
        out: Tensor,
        basis: dict[_MatrixPlace, Tensor],
        q: Tensor,
        p: Tensor,
        *,
        minus: bool = False,
    ) -> None:
        """Write P Q' where matrices are, and what travelled with P where the rest is; or
        subtract it.
        """
        turned, at = self._thin_views(cuts, q, 1), 0
        for cut in cuts:
            part = out[cut.start : cut.stop]
            if cut.matrix:
                product = part.view(cut.matrix)
                torch.addmm(
                    product,
                    basis[cut],
                    turned[cut].t(),
                    beta=int(minus),
                    alpha=-1 if minus else 1,
                    out=product,
                )
                at += cut.matrix[0] * self.rank
            else:
                rest = p[at : at + cut.stop - cut.start]
                part.sub_(rest) if minus else part.copy_(rest)
                at += cut.stop - cut.start
