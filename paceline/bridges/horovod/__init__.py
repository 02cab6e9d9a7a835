"""Horovod's API on paceline's groups.

    import paceline.bridges.horovod.torch as hvd        in a script of your own
    paceline run --horovod train.py                     `import horovod.torch as hvd` finds it

Modules have the names of Horovod's, so that imports in scripts work unchanged.
"""

from __future__ import annotations

from paceline.bridges.horovod.horovodrun import run

__all__ = ["run"]
