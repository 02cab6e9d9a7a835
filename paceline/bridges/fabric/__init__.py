"""Lightning Fabric on paceline: `Fabric(strategy=PacelineStrategy())`.

See docs/bridges/fabric.md.
"""

from paceline.bridges.fabric.strategy import FabricStrategy as PacelineStrategy

__all__ = ["PacelineStrategy"]
