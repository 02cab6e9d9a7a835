"""Accelerate on paceline: `PacelineAccelerator` in place of `accelerate.Accelerator`."""

from paceline.bridges.foreign import TestedLibrary

ACCELERATE = TestedLibrary("accelerate", oldest=(1, 10), newest=(1, 15))
ACCELERATE.check_version()

from paceline.bridges.accelerate.accelerator import PacelineAccelerator  # noqa: E402

__all__ = ["PacelineAccelerator"]
