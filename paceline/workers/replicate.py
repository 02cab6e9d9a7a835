"""How often state that one worker alone has is copied to another."""

from __future__ import annotations

from typing import Literal

# every so many steps; as often as it costs little, where there are several hosts; never
Replicate = int | Literal["auto", "off"]
