"""The Lightning Trainer on paceline: `Trainer(strategy="paceline")`, or with a `PacelineStrategy`.

See docs/bridges/lightning.md.
"""

from paceline.bridges.lightning.strategy import LightningStrategy as PacelineStrategy

__all__ = ["PacelineStrategy"]
