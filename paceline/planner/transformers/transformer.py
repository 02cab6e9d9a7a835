"""A transformer given by numbers: its parameters, operations, matrices and messages.

        one layer of t tensor-parallel workers, forward (Shoeybi et al. 2019)

        x -> norm -> q k v | -> scores -> softmax -> values -> project | -> all-reduce -> dropout, +
          -> norm -> up    | -> activation -------------------> down   | -> all-reduce -> dropout, +

        between two bars each worker has heads / t, and ffn / t columns; outside of them each worker
        has everything, or its part of the sequence with sequence parallelism

Letters in formulas: s sequence, b micro-batch, h hidden, a heads, t workers along `tensor`. Sizes
are in numbers of values; a value of an activation has two bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple

from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice
from paceline.planner.transformers.toml_tables import check_number, read_toml_table

HALF = 2  # bytes of a value in half precision

Attention = Literal["standard", "flash"]
"""Whether scores are written to memory ("standard") or stay inside of one kernel ("flash")."""


class Matmul(NamedTuple):
    """A product of `batch` pairs of matrices: rows x inner times inner x columns."""

    rows: int
    columns: int
    inner: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Operations: a multiplication and an addition for each product."""
        return 2 * self.rows * self.columns * self.inner * self.batch

    @property
    def values(self) -> int:
        """Values that are read and written."""
        return self.batch * (
            self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        )


@dataclass(frozen=True)
class Transformer:
    """A decoder of equal layers, by its numbers.

    Attributes:
        hidden: Length of the vector of a token.
        layers: Number of layers.
        heads: Number of attention heads.
        sequence: Tokens of a sample.
        vocabulary: Number of different tokens.
        global_batch: Samples of one step, over all workers.
        micro_batch: Samples of one micro-batch. None: the planner chooses.
        ffn: Columns between the two matrices of a feed-forward block. Default: 4 times `hidden`.
        kv_heads: Number of heads of keys and values. Default: as many as `heads`.
        gated: Whether the feed-forward block has a third matrix, as in SwiGLU.
        tied: Whether the first and the last matrix are one.
        attention: "standard" or "flash".
        name: What to call it.
    """

    hidden: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int
    global_batch: int
    micro_batch: int | None = None
    ffn: int = 0
    kv_heads: int = 0
    gated: bool = False
    tied: bool = True
    attention: Attention = "standard"
    name: str = "transformer"

    def __post_init__(self) -> None:
        if not self.ffn:
            object.__setattr__(self, "ffn", 4 * self.hidden)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        _check_numbers(self)

    @property
    def kv_width(self) -> int:
        """Columns of the keys, and of the values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, with its biases and norms."""
        h, wide = self.hidden, self.hidden + 2 * self.kv_width
        matrices = h * wide + h * h + (3 if self.gated else 2) * h * self.ffn
        # Models with a gate, as of the Llama family, have no biases and one vector for each norm.
        return matrices + (2 * h if self.gated else wide + h + self.ffn + h + 4 * h)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the first matrix, and of the positions where they are learnt."""
        return (self.vocabulary + (0 if self.gated else self.sequence)) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the last matrix."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters. A tied matrix counts once."""
        return (
            self.layers * self.layer_parameters
            + self.embedding_parameters
            + (0 if self.tied else self.head_parameters)
            + (1 if self.gated else 2) * self.hidden
        )

    def count_model_flops(self) -> int:
        """Count the operations of one step without recomputation: three times the forward.

        For a GPT that is 72 B s l h^2 (1 + s/6h + V/12lh) (Narayanan et al. 2021, appendix, without
        recomputation). Scores of future tokens count, as there.
        """
        forward = self.layers * sum(one.flops for one in list_layer_matmuls(self, 1, 1))
        return 3 * self.global_batch * (forward + make_head_matmul(self, 1, 1).flops)


def _check_numbers(model: Transformer) -> None:
    """Raise `UsageError` for numbers that no transformer has."""
    for field in fields(model):
        value = getattr(model, field.name)
        if field.name in ("gated", "tied"):
            if not isinstance(value, bool):
                raise UsageError(f"{field.name} is {value!r}: it has to be true or false")
        elif field.name == "name":
            if not isinstance(value, str):
                raise UsageError(f"name is {value!r}: it has to be a text")
        elif field.name == "attention":
            if wrong := describe_unknown_choice("attention", value, Attention):
                raise UsageError(wrong)
        elif value is not None or field.name != "micro_batch":
            check_number(field.name, value, whole=True)
    for name, number, divisor in (
        ("hidden", model.hidden, "heads"),
        ("heads", model.heads, "kv_heads"),
        ("global_batch", model.global_batch, "micro_batch"),
    ):
        other = getattr(model, divisor)
        if other and number % other:
            raise UsageError(
                f"{name}={number} can't be divided by {divisor}={other}: take a multiple of {other}"
            )


def list_layer_matmuls(model: Transformer, tensor: int, micro_batch: int) -> tuple[Matmul, ...]:
    """List the matrix products of one layer's forward on one of `tensor` workers.

    Args:
        model: The transformer.
        tensor: Workers along `tensor`. It divides heads and columns.
        micro_batch: Samples.

    Returns:
        The products, in the order in which they are done. With flash attention the two products of
        scores are among them, too, though they run in one kernel.
    """
    tokens, h, s = micro_batch * model.sequence, model.hidden, model.sequence
    heads = micro_batch * model.heads // tensor
    ups = [Matmul(tokens, model.ffn // tensor, h)] * (2 if model.gated else 1)
    return (
        Matmul(tokens, (h + 2 * model.kv_width) // tensor, h),
        *list_attention_matmuls(model, heads, s),
        Matmul(tokens, h, h // tensor),
        *ups,
        Matmul(tokens, h, model.ffn // tensor),
    )


def list_attention_matmuls(model: Transformer, heads: int, sequence: int) -> tuple[Matmul, Matmul]:
    """List the products of queries with keys, and of scores with values, for some heads."""
    depth = model.hidden // model.heads
    return Matmul(sequence, sequence, depth, heads), Matmul(sequence, depth, sequence, heads)


def make_head_matmul(model: Transformer, tensor: int, micro_batch: int) -> Matmul:
    """Make the product that computes the logits, on one of `tensor` workers."""
    # A vocabulary that can't be divided is filled up.
    return Matmul(micro_batch * model.sequence, -(-model.vocabulary // tensor), model.hidden)


def count_hidden_bytes(model: Transformer, micro_batch: int) -> int:
    """Bytes of one tensor of `hidden` values for each token.

    That is what one all-reduce of tensor parallelism sums (two in a layer's forward, two in its
    backward), and what a pipeline sends from one stage to the next.
    """
    return HALF * micro_batch * model.sequence * model.hidden


def read_transformer(path: str | Path) -> Transformer:
    """Read a transformer from the table `[transformer]` of a TOML file.

        [transformer]
        hidden = 4096
        layers = 32
        heads = 32
        sequence = 2048
        vocabulary = 50304
        global_batch = 512
        micro_batch = 4          # may be left out, and so may all that follows
        ffn = 16384
        kv_heads = 8
        gated = false
        tied = true
        attention = "flash"
        name = "GPT 7B"

    Raises:
        UsageError: The file can't be read, a key is missing or unknown, or a number is impossible.
    """
    names = {field.name for field in fields(Transformer)}
    needed = {"hidden", "layers", "heads", "sequence", "vocabulary", "global_batch"}
    table = read_toml_table(path, "transformer", needed=needed, optional=names - needed)
    try:
        return Transformer(**{"name": Path(path).stem, **table})
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
