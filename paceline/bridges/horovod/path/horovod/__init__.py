"""Stands for Horovod on the path of workers of `paceline run --horovod`.

`import horovod.torch` gives the module `paceline.bridges.horovod.torch` itself, and so on for every
module that the bridge has.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

BRIDGE = "paceline.bridges.horovod"


class BridgeFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `horovod.<name>` as the bridge's module of that name."""

    def __init__(self) -> None:
        self._specs: dict[str, Any] = {}  # the bridge's own, by the name in Horovod

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of the bridge; None if the bridge has no such module."""
        name = BRIDGE + fullname.removeprefix("horovod")
        if not fullname.startswith("horovod.") or importlib.util.find_spec(name) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Give the bridge's own module, which may be imported already."""
        module = importlib.import_module(BRIDGE + spec.name.removeprefix("horovod"))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing but restore what the import system has changed."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs[module.__spec__.name]


sys.meta_path.insert(0, BridgeFinder())
sys.modules["horovod"] = importlib.import_module(BRIDGE)
