"""The Trainer of transformers on paceline: `PacelineTrainer`, or `PacelineMixin` for subclasses."""

from paceline.bridges.foreign import TestedLibrary

TRANSFORMERS = TestedLibrary("transformers", oldest=(5, 20), newest=(5, 24))
TRANSFORMERS.check_version()

from paceline.bridges.transformers.trainer import PacelineMixin, PacelineTrainer  # noqa: E402

__all__ = ["PacelineMixin", "PacelineTrainer"]
