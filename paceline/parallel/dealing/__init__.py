"""Which layers of a model are where: on devices of one worker, or on workers while they train."""
