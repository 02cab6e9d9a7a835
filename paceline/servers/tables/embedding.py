"""Embedding bags with rows on servers: a batch pulls the rows it uses, and pushes their gradients.

    ids of this worker's share -- unique --> rows pulled (unique, dim) -- F.embedding_bag --> bags
    backward          gradients of the rows are kept here ...
    optimizer.step    ... until the step sends them

The module knows nothing of servers: a run gives it a `RowSource` when the model is prepared.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.formatting import unknown

Mode = Literal["sum", "mean"]


class RowSource(Protocol):
    """The source of a table's rows."""

    def pull(self, ids: Tensor, *, train: bool) -> Tensor:
        """Pull the rows of these ids (1-D, int64, in order, each once) as they are now, to the
        CPU.
        """
        ...

    def prefetch(self, ids: Tensor) -> None:
        """Announce ids that will be pulled for the next step."""
        ...

    def weigh(self) -> float:
        """Report a backward; return the weight of this worker's gradients in the mean over all
        workers (0: its share is empty).
        """
        ...


class SparseEmbedding(nn.Module):
    """`nn.EmbeddingBag` for tables of any size: rows lie on servers, workers hold those of a batch.

    >>> table = pl.SparseEmbedding(10_000_000, 16, mode="sum")
    >>> optimizer = torch.optim.Adagrad(table.parameters())
    >>> table, optimizer = run.prepare(table, optimizer)
    >>> loss = table(torch.tensor([[3, 5], [8, 3]])).square().mean()

    It takes the same inputs and gives the same numbers as an EmbeddingBag with the same optimizer:
    torch.optim.SGD (without momentum), Adagrad, or SparseAdam (as with EmbeddingBag(sparse=True)).
    `weight` is a handle without rows, for the optimizer: the group that holds it says how the table
    is stepped. `run.prepare(model, optimizer)` connects the servers. Rows and their optimizer state
    stay there, in step with all workers, under any strategy of the rest of the model.

    `state_dict` has the seed and no rows: `run.save` keeps them. Clipping can't see the gradients
    of rows, and raises.

    Args:
        rows: Number of rows. Only rows that had a gradient take memory.
        dim: Length of a row.
        mode: "mean" (default) or "sum" of the rows of a bag.
        padding_idx: A row that counts nothing. Default: none.
        include_last_offset: As for EmbeddingBag. Default: False.
        std: Standard deviation of the normal numbers that rows begin with. Default: 1.
        seed: Seed of these numbers, which depend on the seed and the row alone; tables of the same
            seed begin alike. Default: drawn from torch's generator, as EmbeddingBag's numbers are.
        servers: Number of servers for all tables of the run. Default: one on each host.
        replicas: Number of servers that keep each row, on different hosts if there are enough, for
            all tables of the run. For runs that survive losses (`paceline run --min-workers`).
        dtype: Dtype of the rows. Default: `torch.get_default_dtype()`.
    """

    # why `run.step` can't halve a batch of this module
    whole_batches_only = "sparse parameters have gradients of their own"

    seed: Tensor

    def __init__(
        self,
        rows: int,
        dim: int,
        mode: Mode = "mean",
        *,
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        std: float = 1.0,
        seed: int | None = None,
        servers: int | None = None,
        replicas: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if rows < 1 or dim < 1 or rows > 1 << 62:
            raise UsageError(
                f"SparseEmbedding({rows}, {dim}) is no table; give 1 row and 1 column or more"
            )
        if wrong := unknown("mode", mode, Mode):
            raise UsageError(f"{wrong} (others can't be had from rows of several workers)")
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise UsageError(f"padding_idx={padding_idx} is none of the {rows} rows")
        if not (std >= 0 and math.isfinite(std)):
            raise UsageError(f"std={std} is no deviation; give a number, 0 or more")
        if servers is not None and servers < 1:
            raise UsageError(
                f"servers={servers} is no number of servers; give 1 or more, or leave it out for "
                "one on each host"
            )
        if replicas is not None and replicas < 1:
            raise UsageError(
                f"replicas={replicas} is no number of servers that keep the same; "
                "give 1 (no copies) or more"
            )
        self.rows, self.dim, self.mode, self.std, self.servers, self.replicas = (
            rows,
            dim,
            mode,
            float(std),
            servers,
            replicas,
        )
        self.padding_idx = None if padding_idx is None else padding_idx % rows
        self.include_last_offset = include_last_offset
        self.weight = nn.Parameter(torch.empty(0, dim, dtype=dtype))
        drawn = (
            torch.randint(1 << 62, (), dtype=torch.int64)
            if seed is None
            else torch.tensor(seed, dtype=torch.int64)
        )
        self.register_buffer("seed", drawn)
        self.source: RowSource | None = None
        # what backward passes have added: rows, and gradients
        self._found: list[tuple[Tensor, Tensor]] = []
        self._shown: Tensor | None = None  # the weight.grad that represents it

    def __getstate__(self) -> dict[str, Any]:
        """Detach a copy, or an unpickled one, from the run."""
        return {**self.__dict__, "source": None, "_found": [], "_shown": None}

    def extra_repr(self) -> str:
        """Describe the table as torch's modules do."""
        return f"{self.rows}, {self.dim}, mode={self.mode!r}"

    # ---- forward

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Look up bags of rows: `input` (bags, ids) or, with `offsets` (bags), ids one after the
        other. Returns (bags, dim).

        Raises `UsageError` for an id that is no row, and for per_sample_weights.
        """
        if per_sample_weights is not None:
            raise UsageError(
                "SparseEmbedding takes no per_sample_weights; weigh the bags after it, or use "
                "nn.EmbeddingBag"
            )
        if (input.dim() == 1) != (offsets is not None) or input.dim() not in (1, 2):
            given = "" if offsets is None else " with offsets"
            raise UsageError(
                f"SparseEmbedding got ids of shape {list(input.shape)}{given}; "
                "give (bags, ids), or 1-D ids and offsets"
            )
        source, ids, places = self._source, *self._unique(input)
        training = torch.is_grad_enabled() and self.weight.requires_grad
        values = source.pull(ids, train=training).to(self.weight.device)
        if not len(ids):
            values = values.new_zeros(1, self.dim)  # bags without any rows
        if training:
            values.requires_grad_().register_post_accumulate_grad_hook(
                lambda leaf: self._arrived(ids, leaf)
            )
        padding = None if self.padding_idx is None else _place(ids, self.padding_idx)
        offsets = None if offsets is None else offsets.to(places.device, torch.int64)
        last = self.include_last_offset and offsets is not None
        return F.embedding_bag(
            places, values, offsets, mode=self.mode, include_last_offset=last, padding_idx=padding
        )

    def prefetch(self, input: Tensor) -> None:
        """Announce the ids of the next batch: their rows are sent as soon as the present step
        has been taken, while this worker goes on.
        """
        source, ids = self._source, self._unique(input)[0]
        if len(ids):
            source.prefetch(ids)

    @torch.no_grad()
    def lookup(self, ids: Tensor) -> Tensor:
        """Look up the rows of these ids (any shape), as they are now: `ids.shape` + (dim,).

        Each worker may ask for others.
        """
        unique, places = self._unique(ids)
        return self._source.pull(unique, train=False).to(self.weight.device)[places]

    @property
    def _source(self) -> RowSource:
        if self.source is None:
            raise UsageError(
                "the rows of this SparseEmbedding lie on servers, and it belongs to no run: "
                "give its model to run.prepare first (a copy of a prepared model has no servers)"
            )
        return self.source

    def _unique(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids in `input`, on the CPU, in order, each once; and the index of each
        place among them.
        """
        if input.dtype not in (torch.int64, torch.int32):
            raise UsageError(f"SparseEmbedding got ids of {input.dtype}; give int64")
        ids, places = torch.unique(input.cpu().to(torch.int64), return_inverse=True)
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self.rows:
            wrong = int(ids[0]) if ids[0] < 0 else int(ids[-1])
            raise UsageError(
                f"id {wrong} is no row of a table of {self.rows}; possible are 0 to {self.rows - 1}"
            )
        return ids, places.to(self.weight.device)

    # ---- backward

    def _arrived(self, ids: Tensor, leaf: Tensor) -> None:
        """Take the gradient of pulled rows when a backward reaches them."""
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if grad.requires_grad:
            raise UsageError(
                "backward(create_graph=True) reached a SparseEmbedding: what is sent has no graph; "
                "use torch.autograd.grad"
            )
        self._check()
        factor = self._source.weigh()
        if self.weight.grad is None:
            self._found = []
        self._shown = self.weight.grad = torch.zeros_like(self.weight)
        if factor == 0.0:
            return  # 0 x nan is nan
        grad = grad.cpu()[: len(ids)] if factor == 1.0 else grad.cpu()[: len(ids)] * factor
        if self.padding_idx is not None:
            kept = ids != self.padding_idx
            ids, grad = ids[kept], grad[kept]
        self._found.append((ids, grad))

    def _check(self) -> None:
        """Check `weight.grad`, which represents the gradients found: None after zero_grad,
        nothing else can be done to it.
        """
        grad = self.weight.grad
        if grad is not None and (grad is not self._shown or grad._version):
            raise UsageError(
                "weight.grad of a SparseEmbedding was changed, and the gradients of its rows lie "
                "elsewhere: call zero_grad() with "
                "set_to_none=True (the default), and clip or scale the other parameters alone"
            )

    def kept(self) -> Any:
        """Return the present gradients, for `keep`."""
        return list(self._found), self.weight.grad, self._shown

    def keep(self, kept: Any) -> None:
        """Restore gradients that `kept` gave."""
        gradients, self.weight.grad, self._shown = kept
        self._found = list(gradients)

    def gradient(self) -> list[tuple[Tensor, Tensor]] | None:
        """Return the weighted sum that backward passes have added since `zero_grad`: rows (in
        order, each once), gradients; or None.
        """
        self._check()
        if self.weight.grad is None:
            self._found = []
            return None
        return self._found


def _place(ids: Tensor, row: int) -> int | None:
    places = (ids == row).nonzero()
    return int(places[0, 0]) if len(places) else None
