"""Models come out of any checkpoint, cut or not, with nothing of it in memory that wasn't asked
for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

import paceline as pl
from paceline import cli
from paceline.checkpoint.files import checkpoint, disk, export
from paceline.checkpoint.files.block_files import BlockReader, LocalBlocks, lay_out_blocks
from paceline.checkpoint.files.checkpoint import WrittenBlocks
from paceline.checkpoint.files.file_layout import lay_out_snapshot
from paceline.checkpoint.files.manifest import Metric
from paceline.errors import CheckpointError, UsageError
from paceline.state.blocks import slice_within, whole_box
from paceline.state.snapshot import Snapshot, make_snapshot


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)


def state(model: nn.Module, **more: Any) -> Snapshot:
    optimizer = torch.optim.AdamW(model.parameters())
    return make_snapshot({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more})


def save(folder: Path, model: nn.Module, step: int = 1, *, cut: bool = False, **more: Any) -> Path:
    """A checkpoint; with `cut` the largest tensor lies in two files."""
    packed = state(model, **more)
    if not cut:
        return checkpoint.write_checkpoint(
            folder / "checkpoints", lay_out_snapshot(packed), step, own={}, keep=9
        )
    name, tensor = max(packed.tensors.items(), key=lambda item: item[1].numel())

    def blocks(place: Path) -> list[WrittenBlocks]:
        rows, columns = tensor.shape
        boxes = [((0, rows), (0, 1)), ((0, rows), (1, columns))]
        local = [
            LocalBlocks(
                tensor.dtype,
                tuple(tensor.shape),
                ((box, tensor[slice_within(box, whole_box(tensor.shape))]),),
            )
            for box in boxes
        ]
        layouts = [lay_out_blocks(number, {name: part}) for number, part in enumerate(local)]
        return [
            WrittenBlocks(
                {layout.file: disk.write_file(place / layout.file, layout.layout.iterate_bytes())},
                layout.index,
            )
            for layout in layouts
        ]

    rest = Snapshot(
        packed.version,
        packed.tree,
        {path: value for path, value in packed.tensors.items() if path != name},
    )
    return checkpoint.write_checkpoint(
        folder / "checkpoints", lay_out_snapshot(rest), step, own={}, keep=9, blocks=blocks
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("cut", [False, True])
def test_a_model_comes_out(tmp_path: Path, cut: bool) -> None:
    model, other = Tied(), Tied()
    path = save(tmp_path, model, cut=cut)
    for folder in (tmp_path, tmp_path / "checkpoints", path):
        found = pl.state_dict(folder)
        assert same(found, model.state_dict())
    other.load_state_dict(pl.state_dict(str(path)))
    assert same(other.state_dict(), model.state_dict())
    assert "version" in pl.state_dict(path)._metadata["norm"]  # type: ignore[attr-defined]


def test_only_the_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpoint.save_checkpoint(
        tmp_path,
        make_snapshot({"model": model.state_dict(), "optimizer": optimizer.state_dict()}),
        1,
    )
    asked: list[str] = []
    read = BlockReader.read_rectangle
    monkeypatch.setattr(
        BlockReader, "read_rectangle", lambda self, name: asked.append(name) or read(self, name)
    )
    pl.state_dict(tmp_path)
    assert asked == ["model/weight", "model/bias"]


def test_states_of_single_ranks_stay_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 3)
    checkpoint.save_checkpoint(
        tmp_path,
        state(model),
        1,
        own={rank: make_snapshot({"kept": torch.ones(5)}) for rank in range(2)},
    )
    loaded: list[str] = []
    load_file = safetensors.torch.load_file
    monkeypatch.setattr(
        safetensors.torch, "load_file", lambda path: loaded.append(path.name) or load_file(path)
    )
    assert same(pl.state_dict(tmp_path), model.state_dict()) and loaded == []
    found = checkpoint.load_checkpoint(tmp_path, say=print, lazy=True)
    assert sorted(found.worker_snapshots) == [0, 1] and found.extra_states == ()
    assert checkpoint.load_checkpoint(tmp_path, say=print, lazy=True, own=False).extra_states == ()


def test_the_newest_that_is_whole(tmp_path: Path) -> None:
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    save(tmp_path, old, 1)
    path = save(tmp_path, new, 2)
    assert same(pl.state_dict(tmp_path), new.state_dict())
    (path / "tensors.safetensors").write_bytes(b"")
    with pytest.warns(
        UserWarning, match=r"step-00000002: tensors.safetensors has 0 bytes .* Using step-00000001"
    ):
        assert same(pl.state_dict(tmp_path), old.state_dict())
    with pytest.raises(CheckpointError, match=r"step-00000002 can't be used"):
        pl.state_dict(path)


def test_which_part(tmp_path: Path) -> None:
    two = nn.Linear(1, 2)
    save(tmp_path / "two", nn.Linear(1, 1), model1=two.state_dict(), ema={"weight": torch.ones(2)})
    with pytest.raises(
        UsageError,
        match=r"has 2 models: give the name of a part; possible: ema, model, model1, optimizer",
    ):
        pl.state_dict(tmp_path / "two")
    assert same(pl.state_dict(tmp_path / "two", "model1"), two.state_dict())
    assert same(pl.state_dict(tmp_path / "two", part="ema"), {"weight": torch.ones(2)})
    with pytest.raises(UsageError, match=r"no part 'model2'; possible: .* did you mean model\?"):
        pl.state_dict(tmp_path / "two", "model2")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"there is no folder .*/absent; give the folder of a run"
    ):
        pl.state_dict(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no checkpoint in"):
        pl.state_dict(tmp_path)
    checkpoint.save_checkpoint(tmp_path, make_snapshot([1]), 1)
    with pytest.raises(CheckpointError, match=r"not what a run saves"):
        pl.state_dict(tmp_path)


# paceline export
# --------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["paceline", "export", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("cut", [False, True])
def test_a_file_of_safetensors(
    tmp_path: Path, cut: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = Tied(), tmp_path / "out.safetensors"
    save(tmp_path / "runs" / "circle", model, 7, cut=cut)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "circle", "out.safetensors") == 0
    assert (
        "out.safetensors: the model of runs/circle/checkpoints/step-00000007 at step 7"
        in capsys.readouterr().out
    )
    found = safetensors.torch.load_file(out)
    assert set(found) == set(model.state_dict())
    Tied().load_state_dict(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, late, out = nn.Linear(2, 2), nn.Linear(2, 2), tmp_path / "out.safetensors"
    for step, model, value in ((1, good, 0.9), (2, late, 0.4)):
        checkpoint.save_checkpoint(
            tmp_path / "checkpoints", state(model), step, metric=Metric(value, "max")
        )
    assert run(monkeypatch, tmp_path, out, "--best") == 0
    assert "step-00000001 at step 1" in capsys.readouterr().out
    assert torch.equal(safetensors.torch.load_file(out)["weight"], good.weight)
    assert same(pl.state_dict(tmp_path, best=True), good.state_dict()) and same(
        pl.state_dict(tmp_path), late.state_dict()
    )


def test_a_file_that_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("precious")
    save(tmp_path, nn.Linear(1, 1))
    assert run(monkeypatch, tmp_path, out) == 2
    assert (
        "exists already; choose another name, or replace it with --force" in capsys.readouterr().err
    )
    assert out.read_text() == "precious"
    assert run(monkeypatch, tmp_path, out, "--force") == 0
    assert set(safetensors.torch.load_file(out)) == {"weight", "bias"}


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("precious")
    save(tmp_path, nn.Linear(1, 1))
    monkeypatch.setattr(
        export,
        "view_cpu_bytes",
        lambda tensor: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(CheckpointError, match=r"out.safetensors can't be written: .*No space left"):
        export.export_model(tmp_path, out, force=True, say=print)
    assert out.read_text() == "precious" and len(list(tmp_path.iterdir())) == 2


def test_strides_are_those_of_the_file(tmp_path: Path) -> None:
    checkpoint.save_checkpoint(
        tmp_path, make_snapshot({"model": {"w": torch.arange(6.0).view(2, 3).t()}}), 1
    )
    export.export_model(tmp_path, tmp_path / "o.safetensors", say=print)
    assert torch.equal(
        safetensors.torch.load_file(tmp_path / "o.safetensors")["w"],
        torch.arange(6.0).view(2, 3).t(),
    )


@pytest.mark.parametrize(
    ("value", "what"),
    [(torch.ones(1, dtype=torch.complex64), "torch.complex64"), ({"a": 1}, "dict")],
)
def test_what_such_files_cannot_keep_is_named(tmp_path: Path, value: Any, what: str) -> None:
    checkpoint.save_checkpoint(
        tmp_path, make_snapshot({"model": {"w": torch.ones(1), "odd": value}}), 1
    )
    with pytest.raises(
        CheckpointError,
        match=rf"odd is a {what}, which .safetensors can't store; save the result of paceline",
    ):
        export.export_model(tmp_path, tmp_path / "o.safetensors", say=print)
    with pytest.raises(CheckpointError, match=r"this part is no dict"):
        checkpoint.save_checkpoint(tmp_path, make_snapshot({"model": [1]}), 2)
        export.export_model(tmp_path, tmp_path / "o.safetensors", say=print)
    with pytest.raises(UsageError, match=r"o.pt doesn't end in .safetensors"):
        export.export_model(tmp_path, tmp_path / "o.pt", say=print)
