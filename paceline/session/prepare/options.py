"""Options of run.prepare for loaders and models. One given before there is any is kept for those that come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from paceline import notation
from paceline.data.checks import check_options
from paceline.data.shares import policy
from paceline.errors import UsageError

DEFAULTS: Mapping[str, Any] = {
    **{"loss": "mean", "weigh": None, "accumulate": 1, "shares": None, "readers": "worker", "shard": None, "train": None},
    "pad": False,
    "cost": None,
    "batchnorm": "sync",
    "cut": None,
    "init": None,
}
OF_MODELS = frozenset({"batchnorm", "cut", "init"})
OF_STREAMS = frozenset({"readers", "shard"})


class PrepareOptions:
    """The options of all calls of `prepare`. `given` are those of one call, with None for each that it leaves out.

    `shares`: those of `paceline run --shares`, in the place of the script's.
    """

    def __init__(self, shares: str | None = None) -> None:
        self._shares = None if shares is None else notation.shares(shares)
        self._kept: dict[str, Any] = {}

    def hear(self, given: Mapping[str, Any], size: int, *, loaders: bool, models: bool) -> dict[str, Any]:
        """Return the options for the `loaders` and `models` of this call: what it says, else what was said before there were any.

        `size` is the number of workers. Raises `UsageError` for an unknown value as early as it is said.
        """
        said = {name: value for name, value in given.items() if value is not None}
        found = {**DEFAULTS, **self._before(said), **said}
        if self._shares is not None:
            found["shares"] = self._shares
        _check(found, size)
        later = {name: value for name, value in said.items() if not (models if name in OF_MODELS else loaders)}
        self._kept = {**self._before(later), **later}
        return found

    def _before(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kept options, but for those that can't go together with what is said now."""
        against = {"weigh"} if said.get("loss") == "sum" else {"loss"} if "weigh" in said else set()
        return {name: value for name, value in self._kept.items() if name not in against}

    def of(self, dataset: Any, options: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of one loader. Options for streams that were said before don't hold for other data sets."""
        stream = isinstance(dataset, IterableDataset)
        out = {} if stream else {name: DEFAULTS[name] for name in OF_STREAMS if given.get(name) is None}
        micros = {"accumulate": 1} if options["train"] is False else {}  # nothing is accumulated where nothing is trained
        return {name: value for name, value in {**options, **out, **micros}.items() if name not in OF_MODELS}


def _check(options: Mapping[str, Any], size: int) -> None:
    if options["batchnorm"] not in ("sync", "local"):
        raise UsageError(f"batchnorm={options['batchnorm']!r} is unknown; possible are 'sync' and 'local'")
    check_options(options["loss"], options["weigh"], options["accumulate"])
    policy(options["shares"], size)
