"""The words of codecs: every class of this folder that is written as a call.

    class int8(_LevelCoding):        a class whose name is public,
        ...
        __repr__ = format_as_call    and which is written as the call that makes it: the word int8,
                                     "paceline.codec.dense:int8"

The notation and the servers know such a class as soon as it is defined. Modules are read as text,
not imported: they import torch, and a launcher that only checks a strategy does without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def codec_words() -> Mapping[str, str]:
    """Find the words of all codecs, each with the "module:name" of its class."""
    locations: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        class_name = "_"
        for line in path.read_text(encoding="utf-8").splitlines():
            if heading := re.match(r"class (\w+)", line):
                class_name = heading[1]
            elif line == "    __repr__ = format_as_call" and not class_name.startswith("_"):
                locations[class_name] = f"{__package__}.{path.stem}:{class_name}"
    return locations
