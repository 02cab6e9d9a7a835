"""The dtypes that can be measured, by their names: known without torch, so that the command line
refuses others at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

from paceline.errors import UsageError
from paceline.formatting import choices

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
POSSIBLE: Final = get_args(Dtype)
USUAL: Final[tuple[Dtype, ...]] = ("float32", "bfloat16")


def check(dtypes: Sequence[str]) -> tuple[str, ...]:
    """Return the names, or raise `UsageError` where one can't be measured, is there twice, or
    where there is none.
    """
    for name in dtypes:
        if name not in POSSIBLE:
            raise UsageError(f"{name!r} can't be measured; {choices(str(name), POSSIBLE)}")
    if not dtypes or len(set(dtypes)) < len(dtypes):
        raise UsageError(
            f"dtypes are {', '.join(dtypes) or 'none at all'}: name each one once, and one at "
            "least, such as float32"
        )
    return tuple(dtypes)
