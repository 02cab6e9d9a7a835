"""The factor that GradScalers multiply a loss by before its gradients are taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.errors import UsageError


def loss_scale(scalers: Iterable[Any]) -> float:
    """Return the scale of all enabled GradScalers, or 1 without one. Raises `UsageError` if they differ."""
    known = [scaler for scaler in scalers if scaler.is_enabled()]
    scales = {float(scaler.get_scale()) for scaler in known}
    if len(scales) > 1:
        raise UsageError(
            f"{len(known)} GradScalers have come to different scales ({', '.join(f'{scale:g}' for scale in sorted(scales))}), "
            "so what a codec keeps of a gradient has no unit; use one GradScaler for all, or sync without a codec"
        )
    return scales.pop() if scales else 1.0
