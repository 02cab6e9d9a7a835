"""The versions of Lightning that the bridges for Fabric and the Trainer are tested with."""

from __future__ import annotations

from typing import Final

from paceline.bridges.foreign import TestedLibrary

LIGHTNING: Final = TestedLibrary("lightning", oldest=(2, 6), newest=(2, 6))
