"""Weights of files and dicts come into a model in any layout, and those of another model don't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.meta import meta
from paceline.parallel.placement import Placement, Placements, chunk_range
from paceline.parallel.weights import load_weights, open_weights


def build() -> nn.Module:
    model = nn.Sequential(nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("mask", torch.ones(2), persistent=False)
    return model


def filled() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        name: torch.randn(value.shape).to(value.dtype)
        for name, value in build().state_dict().items()
    } | {"2.weight": torch.ones(6, 4)}


def stored(folder: Path, kind: str, state: dict[str, Tensor]) -> Any:
    if kind == "dict":
        return state
    path = folder / f"model.{kind}"
    if kind == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("kind", ["dict", "safetensors", "pt"])
@pytest.mark.parametrize("unborn", [False, True])
def test_each_worker_gets_its_part(tmp_path: Path, kind: str, unborn: bool) -> None:
    state = filled()
    del state["2.weight"]  # one name of a tied parameter is enough
    source = stored(tmp_path, kind, state)
    for rank in range(2):
        if unborn:
            with meta():
                model = build()
        else:
            model = build()
        kept, placements = model[0].weight, Placements()
        at = (
            Placement.whole("m.0.weight", (6, 4))
            .cut_dim(0, [chunk_range(6, rank, 2)], "tensor")
            .cut_flat(2, 9, "shard")
        )
        torch.utils.swap_tensors(
            kept, nn.Parameter(torch.empty(at.local, device="meta" if unborn else "cpu"))
        )
        placements.add_placement(kept, at)
        with open_weights(source) as weights:
            load_weights(model, weights, placements, prefix="m.")
        assert model[0].weight is kept and model[2].weight is kept
        assert torch.equal(kept.detach(), at.copy_part(state["0.weight"]))
        assert torch.equal(model[1].weight.detach(), state["1.weight"])
        assert torch.equal(model[1].running_var, state["1.running_var"])
        assert torch.equal(model[1].num_batches_tracked, state["1.num_batches_tracked"])


def test_files_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path, "safetensors", {"weight": torch.arange(24.0).view(6, 4)})
    with open_weights(path) as weights:
        assert torch.equal(
            weights.read("weight", ((2, 4), (1, 3))), torch.arange(24.0).view(6, 4)[2:4, 1:3]
        )


def test_the_digest_tells_workers_apart(tmp_path: Path) -> None:
    one, other = filled(), filled()
    other["1.weight"][0] += 1
    digests = []
    for source in (one, filled(), other):
        with open_weights(source) as weights:
            digests.append(weights.digest)
    assert digests[0] == digests[1] != digests[2]


def digest_of(source: Any) -> str:
    with open_weights(source) as weights:
        return weights.digest


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("place", [("small", 1), ("large", 0), ("large", 50_000), ("large", -1)])
def test_the_digest_of_a_file_tells_values_of_the_same_shapes_apart(
    tmp_path: Path, kind: str, place: tuple[str, int]
) -> None:
    def state() -> dict[str, Tensor]:
        return {
            "small": torch.ones(3),
            "large": torch.arange(100_001.0),
            "empty": torch.empty(0, 2),
        }

    changed, (name, at) = state(), place
    changed[name][at] += 1
    folders = [tmp_path / each for each in ("one", "copy", "other")]
    for folder in folders:
        folder.mkdir()
    one, copy, other = (
        stored(folder, kind, each)
        for folder, each in zip(folders, (state(), state(), changed), strict=True)
    )
    assert one.stat().st_size == other.stat().st_size
    assert (
        digest_of(one)
        == digest_of(copy.rename(copy.with_name(f"renamed.{kind}")))
        != digest_of(other)
    )


def test_the_digest_tells_dtypes_apart() -> None:
    assert digest_of({"w": torch.zeros(3)}) != digest_of({"w": torch.zeros(3, dtype=torch.int32)})


def test_a_file_of_torch_counts_as_a_whole(tmp_path: Path) -> None:
    """What no page of the digest has is in the checksums of the file."""
    value = torch.zeros(1_000_000)
    torch.save({"w": value}, tmp_path / "one.pt")
    value[3001] = 1
    torch.save({"w": value}, tmp_path / "other.pt")
    assert digest_of(tmp_path / "one.pt") != digest_of(tmp_path / "other.pt")


def test_errors_of_the_block_are_not_those_of_the_file(tmp_path: Path) -> None:
    path = stored(tmp_path, "safetensors", {"weight": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"^mine$"), open_weights(path):
        raise RuntimeError("mine")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.pop("1.bias"), r"1.bias \[4\] is not in it"),
        (
            lambda state: state.update({"1.biass": state.pop("1.bias")}),
            r"1.bias \[4\] is not in it \(the nearest is 1.biass\)",
        ),
        (
            lambda state: [state.pop("0.weight"), state.pop("2.weight")],
            r"0.weight \[6, 4\] is not in it",
        ),
        (
            lambda state: state.update({"1.bais": torch.ones(1)}),
            r"1.bais is not in the model \(the nearest is 1.bias\)",
        ),
        (
            lambda state: state.update({"1.bias": torch.ones(3)}),
            r"1.bias is \[3\] in it, \[4\] in the model",
        ),
        (lambda state: state.clear(), r"and 2 more"),
    ],
)
def test_weights_of_another_model_change_nothing(
    change: Callable[[dict[str, Tensor]], Any], why: str
) -> None:
    state, model = filled(), build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    change(state)
    with (
        open_weights(state) as weights,
        pytest.raises(UsageError, match=rf"the dict has weights of another model: .*{why}"),
    ):
        load_weights(model, weights, Placements())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Strange:
    pass


def test_what_is_no_file_of_weights(tmp_path: Path) -> None:
    nothing, text = tmp_path / "none.pt", tmp_path / "text.safetensors"
    text.write_text("hello")
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "nested.pt")
    torch.save([1], tmp_path / "list.pt")
    torch.save(Strange(), tmp_path / "pickle.pt")
    wrong: list[tuple[Any, str]] = [
        (nothing, r"there is no file .*none.pt with weights"),
        (text, r"text.safetensors can't be read as weights"),
        (
            tmp_path / "nested.pt",
            r"'model' is a dict, and a state dict has tensors only; give the part of it that has",
        ),
        (tmp_path / "list.pt", r"has a list, and not a state dict"),
        (tmp_path / "pickle.pt", r"pickle.pt can't be read as weights"),
    ]
    for source, why in wrong:
        with pytest.raises(UsageError, match=why), open_weights(source):
            pass
