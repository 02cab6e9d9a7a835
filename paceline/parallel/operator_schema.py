"""The arguments that an operator of torch writes to, by its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def written_arguments(operator: Any) -> Iterator[tuple[int, str]]:
    """Yield the position and name of each argument that an operator writes to.

    Schemas mark such arguments, as in "Tensor(a!) self".

    `operator` is what `__torch_dispatch__` is given as `func`.
    """
    # `_schema` is private to torch, although every mode of torch's own uses it. If it is renamed,
    # this raises. If `alias_info` says otherwise what is written to, writes are overlooked.
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield position, argument.name
