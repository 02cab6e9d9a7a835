"""Numbers of a transformer against those of papers, and against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.planner.transformers.transformer import (
    Matmul,
    Transformer,
    count_hidden_bytes,
    list_layer_matmuls,
    make_head_matmul,
    read_transformer,
)

SMALL = Transformer(64, 3, 4, 32, 100, global_batch=8)
SOURCE = """
[transformer]
hidden = 64
layers = 3
heads = 4
sequence = 32
vocabulary = 100
global_batch = 8
"""


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "billions"),
    [
        (12288, 96, 96, 174.6),
        (20480, 105, 128, 529.6),
        (25600, 128, 160, 1008.0),
        (2304, 24, 24, 1.7),
    ],
)
def test_parameters_are_those_of_sc21(
    hidden: int, layers: int, heads: int, billions: float
) -> None:
    model = Transformer(hidden, layers, heads, 2048, 51200, 1)
    assert round(model.parameters / 1e9, 1) == billions


def test_parameters_of_a_llama() -> None:
    model = Transformer(
        4096, 32, 32, 8192, 128256, 1, ffn=14336, kv_heads=8, gated=True, tied=False
    )
    assert model.parameters == 8_030_261_248  # as Hugging Face counts Llama 3 8B


def test_parameters_of_a_layer_by_hand() -> None:
    matrices = 64 * 192 + 64 * 64 + 2 * 64 * 256
    biases = 192 + 64 + 256 + 64
    assert SMALL.layer_parameters == matrices + biases + 4 * 64


def test_flops_are_those_of_sc21() -> None:
    # 72 B s l h^2 (1 + s/6h + V/12lh): equation 3 without recomputation.
    for model in (SMALL, Transformer(12288, 96, 96, 2048, 51200, 1536)):
        h, layers, s, v = model.hidden, model.layers, model.sequence, model.vocabulary
        formula = (
            72 * model.global_batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
        )
        assert model.count_model_flops() == pytest.approx(formula)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_products_are_divided_among_workers(tensor: int) -> None:
    whole = sum(one.flops for one in list_layer_matmuls(SMALL, 1, 2))
    assert sum(one.flops for one in list_layer_matmuls(SMALL, tensor, 2)) * tensor == whole


def test_shapes_of_products() -> None:
    assert list_layer_matmuls(SMALL, 2, 3) == (
        Matmul(96, 96, 64),
        Matmul(32, 32, 16, 6),
        Matmul(32, 16, 32, 6),
        Matmul(96, 64, 32),
        Matmul(96, 128, 64),
        Matmul(96, 64, 128),
    )
    gated = replace(SMALL, gated=True, kv_heads=2)
    assert list_layer_matmuls(gated, 1, 1)[0] == Matmul(32, 64 + 2 * 32, 64)
    assert len(list_layer_matmuls(gated, 1, 1)) == 7
    assert make_head_matmul(SMALL, 8, 1) == Matmul(32, 13, 64)


def test_bytes_of_a_message() -> None:
    assert count_hidden_bytes(SMALL, 3) == 3 * 32 * 64 * 2


def test_values_of_a_product() -> None:
    assert Matmul(2, 3, 5, 7).values == 7 * (10 + 15 + 6)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SOURCE)
    assert read_transformer(path) == replace(SMALL, name="small")
    path.write_text(SOURCE + 'micro_batch = 2\nffn = 96\nkv_heads = 2\ngated = true\nname = "x"\n')
    assert read_transformer(path) == replace(
        SMALL, name="x", micro_batch=2, ffn=96, kv_heads=2, gated=True
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("heads = 4\n", "lacks heads"),
        ("hidden = 64", "hidden"),
        ("vocabulary = 100", "vocabulary"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: str, word: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(
        SOURCE.replace(change, "" if "lacks" in word else change.split("=", maxsplit=1)[0] + "= -1")
    )
    with pytest.raises(UsageError, match=word) as caught:
        read_transformer(path)
    assert "\n" not in str(caught.value) and "wrong.toml" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["hiden = 1", "micro_batch = 3", "gated = 1", 'attention = "fast"', "kv_heads = 3", "name = 1"],
)
def test_wrong_keys_and_values_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(SOURCE + line)
    with pytest.raises(UsageError, match=line.split(maxsplit=1)[0]):
        read_transformer(path)


def test_no_file_no_table_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    with pytest.raises(UsageError, match="can't be read"):
        read_transformer(path)
    for text in ("a = ", "[cluster]", "", "[transformer]\n[other]"):
        path.write_text(text)
        with pytest.raises(UsageError):
            read_transformer(path)
