from __future__ import annotations

import pytest
import torch

from paceline.comm import fingerprint
from paceline.comm.fingerprint import CallFingerprint, compare, digest
from paceline.errors import Mismatch, UsageError


def test_everything_that_has_to_agree_is_in_the_digest() -> None:
    x = torch.ones(2, 3)
    calls = [
        fingerprint.reducing("all_reduce", x, "sum", "a"),
        fingerprint.reducing("all_reduce", x, "sum", "b"),
        fingerprint.reducing("all_reduce", x, "sum", None),
        fingerprint.reducing("all_reduce", x, "mean", "a"),
        fingerprint.reducing("all_reduce", x.t(), "sum", "a"),
        fingerprint.reducing("all_reduce", x.double(), "sum", "a"),
        fingerprint.reducing("reduce_scatter", x, "sum", "a"),
        fingerprint.reducing("all_reduce", x, "sum", "a", torch.ones(2)),
        fingerprint.rooted(x, 0, 2, "a"),
        fingerprint.rooted(x, 1, 2, "a"),
        fingerprint.rows("all_gather", x, "a"),
        fingerprint.choosing([0, 1], 2),
        fingerprint.choosing([1, 0], 2),
        CallFingerprint("barrier"),
    ]
    assert len({digest(call) for call in calls}) == len(calls)
    assert digest(calls[0]) == digest(
        fingerprint.reducing("all_reduce", torch.zeros(2, 3), "sum", "a")
    )
    assert digest(fingerprint.rows("all_gather", x, None)) == digest(
        fingerprint.rows("all_gather", torch.ones(7, 3), None)
    )


def test_both_sides_are_named() -> None:
    with pytest.raises(Mismatch, match=r"rank 7 at a; ranks 4, 5 at b\. Every worker"):
        compare([("a", ""), ("b", ""), ("b", "")], [7, 4, 5])
    with pytest.raises(UsageError, match=r"a: too long \(rank 1\)"):
        compare([("a", ""), ("a", "too long")])
    compare([("a", ""), ("a", "")])


@pytest.mark.parametrize(
    ("call", "flaw"),
    [
        (fingerprint.rooted(torch.ones(1), 3, 2, None), "0..1"),
        (fingerprint.dealing([torch.ones(1)], 2, None), "1 tensors for 2 ranks"),
        (fingerprint.dealing([torch.ones(1, 2), torch.ones(1, 3)], 2, None), "only the first dim"),
        (fingerprint.choosing([], 2), "at least one"),
        (fingerprint.choosing([5], 2), "0..1"),
        (fingerprint.exchanging([(4, torch.ones(1))], [], 0, 2), "rank 4"),
        (fingerprint.reducing("all_reduce", torch.eye(2).to_sparse(), "sum", None), "sparse"),
        (fingerprint.objects({1, 2}, None)[1], "set is not JSON"),
    ],
)
def test_what_is_wrong_with_the_arguments_is_said(call: CallFingerprint, flaw: str) -> None:
    assert flaw in call.flaw
