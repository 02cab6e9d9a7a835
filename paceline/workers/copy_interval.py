"""How often the state that only one worker has is copied to another worker."""

from __future__ import annotations

from typing import Literal

# A number of steps between two copies; "auto": with several hosts, as often as it costs little;
# "off": never.
Replicate = int | Literal["auto", "off"]
