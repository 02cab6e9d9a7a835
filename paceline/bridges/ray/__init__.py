"""paceline under Ray Train: `TorchTrainer(train_func, torch_config=PacelineConfig())`."""

from __future__ import annotations

from paceline.bridges.foreign import TestedLibrary

TestedLibrary("ray", (2, 60), (2, 60)).check_version()

from paceline.bridges.ray.backend import PacelineBackend, PacelineConfig  # noqa: E402

__all__ = ["PacelineBackend", "PacelineConfig"]
