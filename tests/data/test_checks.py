from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, IterableDataset

from paceline.comm.agreement import Agreement
from paceline.data.checks import check_cost, check_options
from paceline.data.loader import deal_loader
from paceline.errors import DataError
from tests.harness.loaders import Numbers
from tests.harness.thread_groups import spawn


class Counted(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (
            lambda: DataLoader(Counted(), 2),
            {"cost": len},
            "the samples of a stream aren't known before they are read",
        ),
        (
            lambda: DataLoader(Numbers(4), None),
            {"cost": len},
            "each item of this data set is a whole batch",
        ),
        (lambda: DataLoader(Numbers(4), 2), {"cost": 3}, "cost is 3: it must be a function"),
        (
            lambda: DataLoader(Counted(), 2),
            {"shares": "auto", "shard": "mine"},
            "with shard='mine' the stream deals them",
        ),
    ],
)
def test_what_is_not_dealt_by_cost_or_by_speed_is_refused(make, options, text):
    with pytest.raises(DataError, match=text):
        spawn(1, lambda group: deal_loader(make(), Agreement(group), **options))


def test_workers_that_are_not_in_lockstep_are_not_dealt_by_cost():
    check_cost(DataLoader(Numbers(4), 2), len, lockstep=True)
    with pytest.raises(DataError, match="takes samples when it is ready"):
        check_cost(DataLoader(Numbers(4), 2), len, lockstep=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("median", None), "loss='median' is unknown; possible: mean, sum"),
        (("sum", len), "leave one of them out"),
    ],
)
def test_options_by_which_nothing_can_be_dealt_are_refused(options, text):
    with pytest.raises(DataError, match=text):
        check_options(*options)
