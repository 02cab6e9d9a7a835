"""Options of run.prepare for loaders and models.

An option that is given before there is a loader or model applies to later ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from paceline import notation
from paceline.data.checks import check_options
from paceline.data.costs import Cost
from paceline.data.loader import ShareLoader
from paceline.data.shares import RequestedShares, make_policy
from paceline.data.spec import Loss, Sharding, Weigh
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice
from paceline.prepare.cuts import WantedCuts
from paceline.prepare.initial import Init

BatchNorm = Literal["sync", "local"]
# Metrics of torchmetrics are modules.
Preparable = nn.Module | Optimizer | DataLoader[Any] | LRScheduler | torch.amp.GradScaler
S = TypeVar("S")
T = TypeVar("T")
A = TypeVar("A", bound=Preparable)
B = TypeVar("B", bound=Preparable)
C = TypeVar("C", bound=Preparable)
D = TypeVar("D", bound=Preparable)
E = TypeVar("E", bound=Preparable)

if TYPE_CHECKING:

    class PreparedLoader(DataLoader[T]):
        """Type of the loaders that `run.prepare` returns.

        They are of the class `ShareLoader`, and have all attributes of the DataLoader.
        """

        def peek(self) -> Any: ...

else:
    PreparedLoader = ShareLoader


class PrepareKeywords(TypedDict, total=False):
    """The options of `run.prepare`, as its overloads take them."""

    loss: Loss | None
    weigh: Weigh | None
    cost: Cost | None
    shares: RequestedShares
    batchnorm: BatchNorm | None
    train: bool | None
    pad: bool | None
    shard: Sharding | None
    cut: WantedCuts | None
    init: Init | None


DEFAULTS: Mapping[str, Any] = {
    **{"loss": "mean", "weigh": None, "shares": None, "shard": None, "train": None},
    "pad": False,
    "cost": None,
    "batchnorm": "sync",
    "cut": None,
    "init": None,
}
OF_MODELS = frozenset({"batchnorm", "cut", "init"})
OF_STREAMS = frozenset({"shard"})


class PrepareOptions:
    """Options of all calls of `prepare`.

    Args:
        shares: Shares of `paceline run --shares`, in place of the script's. Default: the script's.
    """

    def __init__(self, shares: str | None = None) -> None:
        self._shares = None if shares is None else notation.parse_shares(shares)
        self._kept: dict[str, Any] = {}

    def resolve_options(
        self, given: Mapping[str, Any], size: int, *, loaders: bool, models: bool
    ) -> dict[str, Any]:
        """Resolve the options of one call, and keep options for later calls.

        An option is taken from the call, else from earlier calls that kept it, else its default.

        Args:
            given: Options of the call, with None for each one that it leaves out.
            size: Number of workers.
            loaders: Whether the call has loaders.
            models: Whether the call has models.

        Raises:
            UsageError: An option has an unknown value, even if no object of the call uses it.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        options = {**DEFAULTS, **self._kept_options(chosen), **chosen}
        if self._shares is not None:
            options["shares"] = self._shares
        _check_options(options, size)
        later = {
            name: value
            for name, value in chosen.items()
            if not (models if name in OF_MODELS else loaders)
        }
        self._kept = {**self._kept_options(later), **later}
        return options

    def _kept_options(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Options of earlier calls, without any that contradicts the options of this call."""
        # loss="sum" and weigh can't be combined, so the later one of the two counts.
        contradicted = (
            {"weigh"} if chosen.get("loss") == "sum" else {"loss"} if "weigh" in chosen else set()
        )
        return {name: value for name, value in self._kept.items() if name not in contradicted}

    def loader_options(
        self, dataset: Any, options: dict[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Select the options of one loader.

        Args:
            dataset: The loader's data set.
            options: Resolved options of the call.
            given: Options of the call, with None for each one that it leaves out.
        """
        # An option for streams that an earlier call has given doesn't apply to other data sets.
        reset = (
            {}
            if isinstance(dataset, IterableDataset)
            else {name: DEFAULTS[name] for name in OF_STREAMS if given.get(name) is None}
        )
        return {
            name: value for name, value in {**options, **reset}.items() if name not in OF_MODELS
        }


def _check_options(options: Mapping[str, Any], size: int) -> None:
    if wrong := describe_unknown_choice("batchnorm", options["batchnorm"], BatchNorm):
        raise UsageError(wrong)
    check_options(options["loss"], options["weigh"])
    make_policy(options["shares"], size)
