"""torch's functions for nested tuples, lists and dicts, which are in a private module.

All uses in `parallel/` go through this module. If a version of torch moves or renames one, the
import here fails, and nothing else breaks. `containers.py` has functions that know more kinds of
containers.
"""

from __future__ import annotations

from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "TreeSpec",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]
