"""torch's dispatch modes, which see each operator that is called, and what operators write to.

All uses of these private parts of torch in `parallel/` go through this module, so that a new
version of torch breaks it here alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Private by its module's name, but documented by torch, and used by most libraries that have modes.
# If these are moved or renamed, this import fails.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

__all__ = ["TorchDispatchMode", "is_in_dispatch_mode", "written_arguments"]


def is_in_dispatch_mode() -> bool:
    """Whether a dispatch mode is on in this thread, such as that of a selective checkpoint."""
    return _get_current_dispatch_mode() is not None


def written_arguments(operator: Any) -> Iterator[tuple[int, str]]:
    """Yield the position and name of each argument that an operator writes to.

    Schemas mark such arguments, as in "Tensor(a!) self". `operator` is what `__torch_dispatch__` is
    given as `func`.
    """
    # `_schema` is private to torch, although every mode of torch's own uses it. If it is renamed,
    # this raises. If `alias_info` marks writes in another way, they are overlooked.
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield position, argument.name
