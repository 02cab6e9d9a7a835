"""Tests of bridges whose library isn't in this environment are left out.

`make test` and `make test-bridges` have different libraries, see pyproject.toml.
"""

from __future__ import annotations

import importlib.util

_LIBRARIES = {
    "test_accelerate.py": "accelerate",
    "test_transformers.py": "transformers",
    "test_unchanged.py": "accelerate",
}
collect_ignore = [
    name for name, library in _LIBRARIES.items() if importlib.util.find_spec(library) is None
]
