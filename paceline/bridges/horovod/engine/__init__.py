"""Named operations that ranks submit in any order: agreed in cycles, then run in one order.

submit (any thread) -> engine.py -> controller.py: which operations have all ranks submitted?
                                 -> execution.py: these, in the agreed order, on the groups
handle.wait() <----------------------- results, or an error
"""
