"""Checks of the libraries that bridges stand on: is one installed, and is its version tested?"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import warnings
from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True)
class TestedLibrary:
    """A library that a bridge stands on, with the versions that the bridge was tested with.

    Args:
        distribution: Name on PyPI, such as "lightning".
        oldest: First tested version as numbers, such as (2, 6).
        newest: Last tested version, this one included, such as (2, 6). Patch releases of it count
            as tested.
        extra: The extra of paceline that installs it. Default: the name on PyPI.
        builds: Other names on PyPI of the same library, such as "tensorflow-cpu". Default: none.
    """

    distribution: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    extra: str = ""
    builds: tuple[str, ...] = ()

    def check_version(self) -> tuple[int, ...]:
        """Warn if the installed version is outside of the tested range.

        Returns:
            The installed version as numbers, such as (2, 6, 6).

        Raises:
            UsageError: The library isn't installed. The message has the line for pip.
        """
        installed = self._find_version()
        if installed is None:
            raise UsageError(
                f"{self.distribution} isn't installed, and this bridge needs it: "
                f"pip install 'paceline[{self.extra or self.distribution}]'"
            )
        version = tuple(int(digits) for digits in re.findall(r"\d+", installed)[:3])
        if not self.oldest <= version or version[: len(self.newest)] > self.newest:
            warnings.warn(
                f"{self.distribution} {installed} is not a version that paceline is tested with "
                f"({format_version(self.oldest)} to {format_version(self.newest)})",
                stacklevel=3,
            )
        return version

    def _find_version(self) -> str | None:
        for name in (self.distribution, *self.builds):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return None


def format_version(version: tuple[int, ...]) -> str:
    """Format numbers of a version, such as (2, 6), as "2.6"."""
    return ".".join(map(str, version))
