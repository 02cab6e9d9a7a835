"""Splits the state of a run with cut models into blocks for a checkpoint, and reads it back.

    state of this worker                            checkpoint
    model/up/weight          local, 2 x 6   ---->   a block of the logical 4 x 6 tensor, in this
                                                    worker's file
    optimizer/state/0/step   a number       ---->   unchanged, written once

A checkpoint has logical tensors only, and not the cuts. So it can be read under any other cuts.
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
from paceline.formatting import suggest_nearest
from paceline.parallel.placement import STEP_COUNTS, Placement, Placements, local_part
from paceline.state.blocks import StoredTensor
from paceline.state.snapshot import Json, Snapshot, drop_strides, subtrees_by_key, tensor_path
from paceline.state.versioned import MAX_SHOWN_DIFFERENCES, Stateful


@dataclass(frozen=True)
class CutEntry:
    """A tensor in a state that belongs to a cut parameter.

    Attributes:
        path: Path of the tensor in the state.
        placement: Placement of the local part in the logical parameter.
        description: Description for messages.
        is_parameter: Whether it is the parameter itself, and not state of an optimizer.
        trained_part: Tensor that optimizers step in place of a parameter that this worker also has
            in full. It may be newer than the parameter.
        is_step_count: Whether it is an optimizer's count of steps. If the parameter is a single
            number, a count has the shape of a part.
    """

    path: str
    placement: Placement
    description: str
    is_parameter: bool
    trained_part: Tensor | None = None
    is_step_count: bool = False


# Finds the tensor that is trained in place of a parameter, or None.
FindTrained = Callable[[Parameter], Parameter | None]


def find_cut_entries(
    parts: Mapping[str, Stateful],
    placements: Placements,
    tree: Json,
    renewed: FindTrained | None = None,
) -> Iterator[CutEntry]:
    """Find the tensors of cut parameters in the tree of a state.

    These are the parameters themselves, and the state that optimizers have for them.

    Args:
        parts: Models, optimizers and other objects of the run, by name.
        placements: Place of each parameter.
        tree: Tree of the state.
        renewed: Finds the tensor that is trained in place of a parameter. Without it, a parameter
            that this worker has in full counts as not cut.
    """
    trees = subtrees_by_key(tree)
    for name, part in parts.items():
        stored = subtrees_by_key(trees.get(name))
        if isinstance(part, nn.Module):
            for key, parameter in part.named_parameters(remove_duplicate=False):
                trained = None if renewed is None else renewed(parameter)
                placement = placements.placement_of(parameter if trained is None else trained, key)
                if placement.axes and (path := tensor_path(stored.get(key))) is not None:
                    yield CutEntry(
                        path,
                        placement,
                        f"{name}.{key}",
                        is_parameter=True,
                        trained_part=None if trained is None else local_part(trained),
                    )
        elif isinstance(part, Optimizer):
            # torch numbers parameters over all groups, in order. States have these numbers as keys.
            parameters = [parameter for group in part.param_groups for parameter in group["params"]]
            for index, entry_tree in subtrees_by_key(stored.get("state")).items():
                placement = (
                    placements.placement_of(parameters[index])
                    if index in range(len(parameters))
                    else Placement.whole("", ())
                )
                for key, value in subtrees_by_key(entry_tree).items() if placement.axes else ():
                    if (path := tensor_path(value)) is not None:
                        description = f"{key} that {name} keeps for {placement.name}"
                        yield CutEntry(
                            path,
                            placement,
                            description,
                            is_parameter=False,
                            is_step_count=key in STEP_COUNTS,
                        )


def split_state(
    state: Snapshot,
    parts: Mapping[str, Stateful],
    placements: Placements,
    writes: Callable[[Placement], bool],
    renewed: FindTrained | None = None,
) -> tuple[Snapshot, dict[str, LocalBlocks]]:
    """Split a state into a snapshot without cut tensors and the blocks that this worker writes.

    Args:
        state: State of this worker.
        parts: Models, optimizers and other objects of the run, by name.
        placements: Place of each parameter.
        writes: Whether this worker, of all that hold a part, is the one that writes it.
        renewed: Finds the tensor that is trained in place of a parameter. Default: none is.
    """
    blocks: dict[str, LocalBlocks] = {}
    cut_paths: set[str] = set()
    # Tied parameters have several paths. Their blocks are stored under the first path only.
    tied_paths = {
        path: first
        for path, first in _find_shared_parameters(parts, placements, state.tree)
        if path != first
    }
    for entry in find_cut_entries(parts, placements, state.tree, renewed):
        tensor, placement = (
            state.tensors[entry.path] if entry.trained_part is None else entry.trained_part,
            entry.placement,
        )
        if not _is_part(entry, tuple(tensor.shape), placement.local):
            continue
        # Each worker leaves cut tensors out of its snapshot, and one worker writes each part.
        cut_paths.add(entry.path)
        if writes(placement) and entry.path not in tied_paths:
            pieces = tuple(
                (region.logical, region.view_local(tensor)) for region in placement.regions
            )
            blocks[entry.path] = LocalBlocks(tensor.dtype, placement.shape, pieces)
    uncut_tensors = {
        path: tensor for path, tensor in state.tensors.items() if path not in cut_paths
    }
    return Snapshot(
        state.version,
        _replace_paths(drop_strides(state.tree, cut_paths), tied_paths),
        uncut_tensors,
    ), blocks


def _find_shared_parameters(
    parts: Mapping[str, Stateful], placements: Placements, tree: Json
) -> Iterator[tuple[str, str]]:
    """Yield each path of an empty cut parameter, with the first path of the same parameter.

    A snapshot finds tied tensors by their memory. Tensors without elements have none, so tied ones
    would look like separate parameters.
    """
    trees = subtrees_by_key(tree)
    for name, part in parts.items():
        # By id of the parameter: the first path under which the model has it.
        first_paths, stored = dict[int, str](), subtrees_by_key(trees.get(name))
        for key, parameter in (
            part.named_parameters(remove_duplicate=False) if isinstance(part, nn.Module) else ()
        ):
            if (
                (path := tensor_path(stored.get(key))) is not None
                and not parameter.numel()
                and placements.placement_of(parameter, key).axes
            ):
                yield path, first_paths.setdefault(id(parameter), path)


def _replace_paths(tree: Json, new_paths: Mapping[str, str]) -> Json:
    """Copy a tree, and replace the paths of tensors that are in `new_paths`."""
    if not new_paths or not isinstance(tree, dict | list):
        return tree
    if isinstance(tree, list):
        return [_replace_paths(item, new_paths) for item in tree]
    path = tensor_path(tree)
    return (
        {**tree, "path": new_paths.get(path, path)}
        if path is not None
        else {key: _replace_paths(value, new_paths) for key, value in tree.items()}
    )


def read_local_state(
    state: Snapshot, reader: BlockReader, parts: Mapping[str, Stateful], placements: Placements
) -> Snapshot:
    """Read this worker's part of a state that was saved under any cuts.

    Args:
        state: Tree of the saved state. Its tensors are not used.
        reader: Reads the saved tensors.
        parts: Models, optimizers and other objects of the run, by name.
        placements: Place of each parameter.

    Raises:
        CheckpointError: The state is of another model.
    """
    _check_same_model(parts, placements, state.tree, reader.index)
    # Tensors of parameters that are cut now, whether they were cut before or not.
    places = {
        entry.path: entry.placement
        for entry in find_cut_entries(parts, placements, state.tree)
        if _is_part(entry, reader.get_stored_tensor(entry.path).shape, entry.placement.shape)
    }
    tensors = {
        path: _read_local_part(reader, path, places[path])
        if path in places
        else reader.read_rectangle(path)
        for path in reader.index
    }
    return Snapshot(state.version, drop_strides(state.tree, places), tensors)


def _read_local_part(reader: BlockReader, path: str, placement: Placement) -> Tensor:
    local = torch.empty(placement.local, dtype=reader.get_stored_tensor(path).dtype)
    for region in placement.regions:
        region.view_local(local).copy_(reader.read_rectangle(path, region.logical))
    return local


def _is_part(entry: CutEntry, shape: tuple[int, ...], parameter_shape: tuple[int, ...]) -> bool:
    """Whether a tensor has the shape of its parameter, and so is cut as the parameter is.

    Raises `CheckpointError` for a tensor that has another shape and is not a single number.
    """
    if shape == parameter_shape:
        return not entry.is_step_count or shape != ()
    if entry.is_parameter or torch.Size(shape).numel() > 1:
        raise CheckpointError(
            f"{entry.description} has the shape {list(shape)}, "
            f"and the parameter has {list(parameter_shape)}: "
            "the optimizer state of a cut parameter can be saved if it has the same shape or is a "
            "single number; use an optimizer with such state, or don't cut this parameter"
        )
    return False


def _check_same_model(
    parts: Mapping[str, Stateful],
    placements: Placements,
    tree: Json,
    index: Mapping[str, StoredTensor],
) -> None:
    """Raise `CheckpointError` for a state of another model, with the first differences."""
    # Shapes are those of the logical tensors: cuts may differ, but the model may not.
    differences, trees = list[str](), subtrees_by_key(tree)
    for name, part in parts.items():
        if not isinstance(part, nn.Module) or name not in trees:
            continue
        stored, local_names = subtrees_by_key(trees[name]), part.state_dict()
        for key, parameter in part.named_parameters(remove_duplicate=False):
            shape = list(placements.placement_of(parameter, key).shape)
            if key not in stored:
                differences.append(
                    f"{name}.{key} {shape} is not in it{suggest_nearest(key, stored)}"
                )
            elif (path := tensor_path(stored[key])) is not None and list(
                index[path].shape
            ) != shape:
                differences.append(f"{name}.{key} is {list(index[path].shape)} in it, {shape} here")
        differences += [f"{name}.{key} is not here" for key in stored if key not in local_names]
    if differences:
        more = (
            f" and {len(differences) - MAX_SHOWN_DIFFERENCES} more"
            if len(differences) > MAX_SHOWN_DIFFERENCES
            else ""
        )
        raise CheckpointError(
            "this state is of another model: "
            f"{'; '.join(differences[:MAX_SHOWN_DIFFERENCES])}{more}. "
            "Build the same model and optimizers as in the "
            "run that saved it, or start from the beginning"
        )
