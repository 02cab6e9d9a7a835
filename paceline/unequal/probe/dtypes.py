"""Names of the dtypes that can be measured.

The module doesn't import torch, so the command line refuses other names at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

from paceline.errors import UsageError
from paceline.formatting import format_choices

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
POSSIBLE: Final = get_args(Dtype)
USUAL: Final[tuple[Dtype, ...]] = ("float32", "bfloat16")


def check_dtypes(dtypes: Sequence[str]) -> tuple[str, ...]:
    """Check the names of dtypes, and make them a tuple.

    Raises:
        UsageError: A name is unknown or repeated, or there is none.
    """
    for name in dtypes:
        if name not in POSSIBLE:
            raise UsageError(f"{name!r} can't be measured; {format_choices(str(name), POSSIBLE)}")
    if not dtypes or len(set(dtypes)) < len(dtypes):
        raise UsageError(
            f"dtypes are {', '.join(dtypes) or 'none at all'}: name each one once, and at least "
            "one, such as float32"
        )
    return tuple(dtypes)
