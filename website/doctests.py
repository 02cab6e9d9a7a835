"""Examples in docstrings, which have the prompts of a console, as blocks of code that can be
copied.
"""

from __future__ import annotations

import re

BLOCK = re.compile(
    r"(?:^(?:>>>|\.\.\.)(?: .*)?\n?)+(?P<answer>(?:^(?!>>>|\.\.\. ).*\S.*\n?)*)", re.MULTILINE
)


def fenced(text: str) -> str:
    """Return a docstring with its examples as fenced blocks, without prompts; what they answer
    is a comment.
    """
    return BLOCK.sub(lambda found: _block(found[0].rstrip("\n").split("\n")) + "\n", text).rstrip(
        "\n"
    )


def _block(lines: list[str]) -> str:
    return "\n".join(
        [
            "```python",
            *(line[4:] if line.startswith((">>>", "...")) else f"# {line}" for line in lines),
            "```",
        ]
    )
