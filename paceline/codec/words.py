"""The words of codecs: each class of this folder that is written as a call.

    class int8(_LevelCoding):        a class whose name is public,
        ...
        __repr__ = format_as_call    and which is written as the call that makes it: the word int8,
                                     "paceline.codec.dense:int8"

Defining such a class is all that the notation and the servers need to know it. Modules are read,
not imported: they import torch, and a launcher that checks a strategy does without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def codec_words() -> Mapping[str, str]:
    """Find each word of a codec, with the "module:name" that makes it."""
    found: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        name = "_"
        for line in path.read_text(encoding="utf-8").splitlines():
            if heading := re.match(r"class (\w+)", line):
                name = heading[1]
            elif line == "    __repr__ = format_as_call" and not name.startswith("_"):
                found[name] = f"{__package__}.{path.stem}:{name}"
    return found
