"""The state of a run whose models are cut: which tensors are parts, and how they are stored.

    state of this worker                            checkpoint
    model/up/weight          local, 2 x 6   ---->   a block of the logical 4 x 6 tensor, in this
                                                    worker's file
    optimizer/state/0/step   a number       ---->   as it is, written once

A checkpoint doesn't mention the cuts under which it was saved, so it can be read under any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.checkpoint.files.block_files import BlockReader, LocalBlocks
from paceline.errors import CheckpointError
from paceline.formatting import nearest
from paceline.parallel.placement import STEP_COUNTS, Placement, Placements, local_part
from paceline.state.blocks import StoredTensor
from paceline.state.snapshot import Json, Snapshot, contiguous, entries, path_of
from paceline.state.versioned import SHOWN, Stateful


@dataclass(frozen=True)
class CutEntry:
    """A tensor in a state that belongs to a parameter that is cut: its path, and where the
    parameter is. `own`: the parameter itself.

    `piece`: what optimizers step in the place of a parameter that is whole here as well, and may be
    newer than it. `counts`: an optimizer's count of steps, which looks like a part where the
    parameter is one number.
    """

    path: str
    placement: Placement
    what: str  # in words
    own: bool
    piece: Tensor | None = None
    counts: bool = False


Renewed = Callable[[Parameter], Parameter | None]


def cut_entries(
    parts: Mapping[str, Stateful],
    placements: Placements,
    tree: Json,
    renewed: Renewed | None = None,
) -> Iterator[CutEntry]:
    """Find in the tree of a state what belongs to parameters that are cut: these themselves, and
    what optimizers keep of them.

    `renewed` says what is trained in the place of a parameter; without it, parameters that are
    whole here count as not cut.
    """
    trees = entries(tree)
    for name, part in parts.items():
        known = entries(trees.get(name))
        if isinstance(part, nn.Module):
            for key, parameter in part.named_parameters(remove_duplicate=False):
                piece = None if renewed is None else renewed(parameter)
                placement = placements.placement_of(parameter if piece is None else piece, key)
                if placement.axes and (path := path_of(known.get(key))) is not None:
                    yield CutEntry(
                        path,
                        placement,
                        f"{name}.{key}",
                        own=True,
                        piece=None if piece is None else local_part(piece),
                    )
        elif isinstance(part, Optimizer):
            parameters = [parameter for group in part.param_groups for parameter in group["params"]]
            for number, node in entries(known.get("state")).items():
                placement = (
                    placements.placement_of(parameters[number])
                    if number in range(len(parameters))
                    else Placement.whole("", ())
                )
                for key, value in entries(node).items() if placement.axes else ():
                    if (path := path_of(value)) is not None:
                        what = f"{key} that {name} keeps of {placement.name}"
                        yield CutEntry(path, placement, what, own=False, counts=key in STEP_COUNTS)


def split(
    state: Snapshot,
    parts: Mapping[str, Stateful],
    placements: Placements,
    writes: Callable[[Placement], bool],
    renewed: Renewed | None = None,
) -> tuple[Snapshot, dict[str, LocalBlocks]]:
    """Divide a state into the tree of its uncut parts and the blocks that this worker writes.

    `writes` tells by placement whether this worker writes its part, as the only one that holds it.
    """
    blocks: dict[str, LocalBlocks] = {}
    cut: set[str] = set()
    again = {
        path: first for path, first in _repeated(parts, placements, state.tree) if path != first
    }
    for entry in cut_entries(parts, placements, state.tree, renewed):
        tensor, at = (
            state.tensors[entry.path] if entry.piece is None else entry.piece,
            entry.placement,
        )
        if not _is_part(entry, tuple(tensor.shape), at.local):
            continue
        cut.add(entry.path)
        if writes(at) and entry.path not in again:
            pieces = tuple((region.logical, region.view_local(tensor)) for region in at.regions)
            blocks[entry.path] = LocalBlocks(tensor.dtype, at.shape, pieces)
    whole = {path: tensor for path, tensor in state.tensors.items() if path not in cut}
    return Snapshot(state.version, _tied(contiguous(state.tree, cut), again), whole), blocks


def _repeated(
    parts: Mapping[str, Stateful], placements: Placements, tree: Json
) -> Iterator[tuple[str, str]]:
    """Yield the paths of each parameter that is cut and has several names, with the first:
    without elements, it looks like several.
    """
    trees = entries(tree)
    for name, part in parts.items():
        first, known = dict[int, str](), entries(trees.get(name))
        for key, parameter in (
            part.named_parameters(remove_duplicate=False) if isinstance(part, nn.Module) else ()
        ):
            if (
                (path := path_of(known.get(key))) is not None
                and not parameter.numel()
                and placements.placement_of(parameter, key).axes
            ):
                yield path, first.setdefault(id(parameter), path)


def _tied(tree: Json, again: Mapping[str, str]) -> Json:
    """Make the same tree, in which these paths are others."""
    if not again or not isinstance(tree, dict | list):
        return tree
    if isinstance(tree, list):
        return [_tied(item, again) for item in tree]
    path = path_of(tree)
    return (
        {**tree, "path": again.get(path, path)}
        if path is not None
        else {key: _tied(value, again) for key, value in tree.items()}
    )


def gather(
    state: Snapshot, reader: BlockReader, parts: Mapping[str, Stateful], placements: Placements
) -> Snapshot:
    """Read this worker's part of a state, from whatever layout.

    `state` has the tree of all, and needs no tensors.

    Raises `CheckpointError` where it is of another model.
    """
    _compare(parts, placements, state.tree, reader.index)
    places = {
        entry.path: entry.placement
        for entry in cut_entries(parts, placements, state.tree)
        if _is_part(entry, reader.stored(entry.path).shape, entry.placement.shape)
    }
    tensors = {
        path: _local(reader, path, places[path]) if path in places else reader.read(path)
        for path in reader.index
    }
    return Snapshot(state.version, contiguous(state.tree, places), tensors)


def _local(reader: BlockReader, path: str, at: Placement) -> Tensor:
    local = torch.empty(at.local, dtype=reader.stored(path).dtype)
    for region in at.regions:
        region.view_local(local).copy_(reader.read(path, region.logical))
    return local


def _is_part(entry: CutEntry, found: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Whether a tensor is cut as its parameter is, being of its shape; raises for one that is
    neither that nor a number.
    """
    if found == parameter:
        return not entry.counts or found != ()
    if entry.own or torch.Size(found).numel() > 1:
        raise CheckpointError(
            f"{entry.what} has the shape {list(found)} where the parameter has {list(parameter)}: "
            "only what has its parameter's shape, or "
            "is a number, can be saved where the parameter is cut; use an optimizer that keeps "
            "such, or don't cut this parameter"
        )
    return False


def _compare(
    parts: Mapping[str, Stateful],
    placements: Placements,
    tree: Json,
    index: Mapping[str, StoredTensor],
) -> None:
    """Raise for a state of another model, with the first differences in names and shapes."""
    lines, trees = list[str](), entries(tree)
    for name, part in parts.items():
        if not isinstance(part, nn.Module) or name not in trees:
            continue
        known, here = entries(trees[name]), part.state_dict()
        for key, parameter in part.named_parameters(remove_duplicate=False):
            shape = list(placements.placement_of(parameter, key).shape)
            if key not in known:
                lines.append(f"{name}.{key} {shape} is not in it{nearest(key, known)}")
            elif (path := path_of(known[key])) is not None and list(index[path].shape) != shape:
                lines.append(f"{name}.{key} is {list(index[path].shape)} in it, {shape} here")
        lines += [f"{name}.{key} is not here" for key in known if key not in here]
    if lines:
        more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise CheckpointError(
            f"this state is not of what it is loaded into: {'; '.join(lines[:SHOWN])}{more}. "
            "Build the same model and optimizers as in the "
            "run that saved it, or start from the beginning"
        )
