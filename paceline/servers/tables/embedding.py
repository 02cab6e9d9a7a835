"""Embedding bags with rows on servers: a batch pulls the rows it uses, and pushes their gradients.

    ids of this worker's share -- unique --> rows pulled (unique, dim) -- F.embedding_bag --> bags
    backward          gradients of the rows are kept here ...
    optimizer.step    ... until the step sends them

The module doesn't know servers: a run gives it a `RowSource` when the model is prepared.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice

Mode = Literal["sum", "mean"]


class RowSource(Protocol):
    """The source of a table's rows."""

    def pull(self, ids: Tensor, *, train: bool) -> Tensor:
        """Pull rows as they are now, to the CPU.

        Args:
            ids: Ids of the rows: 1-D, int64, sorted, unique.
            train: Whether the rows will get a gradient.
        """
        ...

    def prefetch(self, ids: Tensor) -> None:
        """Announce ids that will be pulled after the next step."""
        ...

    def report_backward(self) -> float:
        """Report that a backward has reached the table.

        Returns the weight of this worker's gradients in the mean over all workers. It is 0 if the
        worker has no samples.
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
        padding_idx: A row that adds nothing to a bag, and is not trained. Default: none.
        include_last_offset: As for EmbeddingBag. Default: False.
        std: Standard deviation of the normal numbers that rows begin with. Default: 1.
        seed: Seed of these numbers, which depend on the seed and the row alone; tables of the same
            seed begin alike. Default: drawn from torch's generator, as EmbeddingBag's numbers are.
        servers: Number of servers for all tables of the run. Default: one on each host.
        replicas: Number of servers that keep each row, on different hosts if there are enough, for
            all tables of the run. For runs that survive losses (`paceline run --min-workers`).
        dtype: Dtype of the rows. Default: `torch.get_default_dtype()`.
    """

    # The reason why `run.step` can't halve a batch of this module, for its message.
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
                f"SparseEmbedding({rows}, {dim}) is not a table; give 1 row and 1 column or more"
            )
        if wrong := describe_unknown_choice("mode", mode, Mode):
            raise UsageError(f"{wrong} (a table on servers has no other modes)")
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise UsageError(
                f"padding_idx={padding_idx} is not a row of a table of {rows} rows; give "
                f"{-rows} to {rows - 1}"
            )
        if not (std >= 0 and math.isfinite(std)):
            raise UsageError(f"std={std} is not a standard deviation; give a number, 0 or more")
        if servers is not None and servers < 1:
            raise UsageError(
                f"servers={servers} is not a number of servers; give 1 or more, or leave it out "
                "for one on each host"
            )
        if replicas is not None and replicas < 1:
            raise UsageError(
                f"replicas={replicas} is not a number of copies; give 1 (each row is on one "
                "server) or more"
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
        # Gradients of the backward passes since zero_grad: ids of rows, and values.
        self._found: list[tuple[Tensor, Tensor]] = []
        self._shown: Tensor | None = None  # the weight.grad that stands for them

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy or a pickle, which are detached from the run."""
        return {**self.__dict__, "source": None, "_found": [], "_shown": None}

    def extra_repr(self) -> str:
        """Describe the table as torch's modules do."""
        return f"{self.rows}, {self.dim}, mode={self.mode!r}"

    # ---- forward

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Look up bags of rows. Returns (bags, dim).

        Args:
            input: Ids of shape (bags, ids of a bag), or 1-D with `offsets`.
            offsets: Index in `input` at which each bag begins. Default: none.
            per_sample_weights: Not supported.

        Raises:
            UsageError: An id is not a row, or per_sample_weights are given.
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
        source, ids, places = self._source, *self._find_unique(input)
        training = torch.is_grad_enabled() and self.weight.requires_grad
        values = source.pull(ids, train=training).to(self.weight.device)
        # F.embedding_bag refuses a table without rows, even if all bags are empty.
        if not len(ids):
            values = values.new_zeros(1, self.dim)
        # The pulled rows are a leaf of their own: the hook takes their gradient from backward.
        if training:
            values.requires_grad_().register_post_accumulate_grad_hook(
                lambda leaf: self._add_gradient(ids, leaf)
            )
        padding = None if self.padding_idx is None else _find_place(ids, self.padding_idx)
        offsets = None if offsets is None else offsets.to(places.device, torch.int64)
        last = self.include_last_offset and offsets is not None
        return F.embedding_bag(
            places, values, offsets, mode=self.mode, include_last_offset=last, padding_idx=padding
        )

    def prefetch(self, input: Tensor) -> None:
        """Announce the ids of the next batch.

        Servers send their rows as soon as the present step is made, while this worker goes on.
        """
        source, ids = self._source, self._find_unique(input)[0]
        if len(ids):
            source.prefetch(ids)

    @torch.no_grad()
    def lookup(self, ids: Tensor) -> Tensor:
        """Look up the rows of ids of any shape, as they are now. Returns `ids.shape` + (dim,).

        Each worker may look up other ids.
        """
        unique, places = self._find_unique(ids)
        return self._source.pull(unique, train=False).to(self.weight.device)[places]

    @property
    def _source(self) -> RowSource:
        if self.source is None:
            raise UsageError(
                "the rows of this SparseEmbedding are on servers, and it belongs to no run: "
                "give its model to run.prepare first (a copy of a prepared model has no servers)"
            )
        return self.source

    def _find_unique(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Find the unique ids in `input`, sorted, on the CPU; and the index of each element."""
        if input.dtype not in (torch.int64, torch.int32):
            raise UsageError(f"SparseEmbedding got ids of {input.dtype}; give int64")
        ids, places = torch.unique(input.cpu().to(torch.int64), return_inverse=True)
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self.rows:
            wrong = int(ids[0]) if ids[0] < 0 else int(ids[-1])
            raise UsageError(
                f"id {wrong} is not a row of a table of {self.rows} rows; give 0 to {self.rows - 1}"
            )
        return ids, places.to(self.weight.device)

    # ---- backward

    def _add_gradient(self, ids: Tensor, leaf: Tensor) -> None:
        """Take the gradient of pulled rows, when a backward reaches them."""
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if grad.requires_grad:
            raise UsageError(
                "backward(create_graph=True) reached a SparseEmbedding, whose gradients go to "
                "servers without a graph: use torch.autograd.grad"
            )
        self._check_weight_grad()
        factor = self._source.report_backward()
        # zero_grad has set weight.grad to None: the gradients before it are over.
        if self.weight.grad is None:
            self._found = []
        self._shown = self.weight.grad = torch.zeros_like(self.weight)
        # Gradients of an empty share may be nan, and 0 x nan is nan.
        if factor == 0.0:
            return
        grad = grad.cpu()[: len(ids)] if factor == 1.0 else grad.cpu()[: len(ids)] * factor
        if self.padding_idx is not None:
            is_trained = ids != self.padding_idx
            ids, grad = ids[is_trained], grad[is_trained]
        self._found.append((ids, grad))

    def _check_weight_grad(self) -> None:
        """Raise `UsageError` if `weight.grad` was changed by anything but zero_grad.

        It stands for the gradients of rows, so changes of it would be ignored.
        """
        grad = self.weight.grad
        # `_version` is private in torch: it counts changes in place. Without it, scaling or
        # clipping of weight.grad would go unnoticed.
        if grad is not None and (grad is not self._shown or grad._version):
            raise UsageError(
                "weight.grad of a SparseEmbedding was changed, and it doesn't have the gradients "
                "of the rows: call zero_grad() with set_to_none=True (the default), and clip or "
                "scale the other parameters alone"
            )

    def kept(self) -> Any:
        """The present gradients, for `restore_gradients`."""
        return list(self._found), self.weight.grad, self._shown

    def keep(self, saved: Any) -> None:
        """Restore the gradients that `save_gradients` returned."""
        gradients, self.weight.grad, self._shown = saved
        self._found = list(gradients)

    def gradient(self) -> list[tuple[Tensor, Tensor]] | None:
        """Weighted gradients of the backward passes since zero_grad; None if there was none.

        Each is the ids of rows (sorted, unique) and their values.
        """
        self._check_weight_grad()
        if self.weight.grad is None:
            self._found = []
            return None
        return self._found


def _find_place(ids: Tensor, row: int) -> int | None:
    places = (ids == row).nonzero()
    return int(places[0, 0]) if len(places) else None
