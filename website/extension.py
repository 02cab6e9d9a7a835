"""What griffe calls while mkdocstrings reads the package: for examples in docstrings."""

from __future__ import annotations

from typing import Any

import griffe

from website.doctests import fenced


class Examples(griffe.Extension):
    """Puts examples into blocks of code."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
