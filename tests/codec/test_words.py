"""A codec is a word by its definition, and nothing else is one."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import paceline.codec
from paceline.codec.words import codec_words
from paceline.formatting import format_as_call


def test_words_are_the_classes_that_are_written_as_calls() -> None:
    found = {}
    for path in Path(str(paceline.codec.__file__)).parent.glob("*.py"):
        module = importlib.import_module(f"paceline.codec.{path.stem}")
        for name, value in vars(module).items():
            if (
                isinstance(value, type)
                and vars(value).get("__repr__") is format_as_call
                and value.__module__ == module.__name__
            ):
                found[name] = f"{module.__name__}:{name}"
    assert codec_words() == found and {"int8", "topk", "where", "powersgd", "auto"} <= set(found)


def test_words_are_found_without_torch() -> None:
    code = (
        "import sys; from paceline.codec.words import codec_words; assert codec_words(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
