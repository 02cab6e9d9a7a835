from __future__ import annotations

import pytest
import torch

from paceline.comm import fingerprint
from paceline.comm.fingerprint import CallFingerprint, check_calls_agree, digest_call
from paceline.errors import Mismatch, UsageError


def test_everything_that_has_to_agree_is_in_the_digest() -> None:
    x = torch.ones(2, 3)
    calls = [
        fingerprint.reduction_call("all_reduce", x, "sum", "a"),
        fingerprint.reduction_call("all_reduce", x, "sum", "b"),
        fingerprint.reduction_call("all_reduce", x, "sum", None),
        fingerprint.reduction_call("all_reduce", x, "mean", "a"),
        fingerprint.reduction_call("all_reduce", x.t(), "sum", "a"),
        fingerprint.reduction_call("all_reduce", x.double(), "sum", "a"),
        fingerprint.reduction_call("reduce_scatter", x, "sum", "a"),
        fingerprint.reduction_call("all_reduce", x, "sum", "a", torch.ones(2)),
        fingerprint.broadcast_call(x, 0, 2, "a"),
        fingerprint.broadcast_call(x, 1, 2, "a"),
        fingerprint.rows_call("all_gather", x, "a"),
        fingerprint.subgroup_call([0, 1], 2),
        fingerprint.subgroup_call([1, 0], 2),
        CallFingerprint("barrier"),
    ]
    assert len({digest_call(call) for call in calls}) == len(calls)
    assert digest_call(calls[0]) == digest_call(
        fingerprint.reduction_call("all_reduce", torch.zeros(2, 3), "sum", "a")
    )
    assert digest_call(fingerprint.rows_call("all_gather", x, None)) == digest_call(
        fingerprint.rows_call("all_gather", torch.ones(7, 3), None)
    )


def test_both_sides_are_named() -> None:
    with pytest.raises(Mismatch, match=r"rank 7 at a; ranks 4, 5 at b\. Every worker"):
        check_calls_agree([("a", ""), ("b", ""), ("b", "")], [7, 4, 5])
    with pytest.raises(UsageError, match=r"a: too long \(rank 1\)"):
        check_calls_agree([("a", ""), ("a", "too long")])
    check_calls_agree([("a", ""), ("a", "")])


@pytest.mark.parametrize(
    ("call", "flaw"),
    [
        (fingerprint.broadcast_call(torch.ones(1), 3, 2, None), "0..1"),
        (fingerprint.all_to_all_call([torch.ones(1)], 2, None), "1 tensors for 2 ranks"),
        (
            fingerprint.all_to_all_call([torch.ones(1, 2), torch.ones(1, 3)], 2, None),
            "only the first dim",
        ),
        (fingerprint.subgroup_call([], 2), "at least one"),
        (fingerprint.subgroup_call([5], 2), "0..1"),
        (fingerprint.exchange_call([(4, torch.ones(1))], [], 0, 2), "rank 4"),
        (fingerprint.reduction_call("all_reduce", torch.eye(2).to_sparse(), "sum", None), "sparse"),
        (fingerprint.objects_call({1, 2}, None)[1], "set is not JSON"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_said(call: CallFingerprint, flaw: str) -> None:
    assert flaw in call.flaw
