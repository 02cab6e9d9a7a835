from __future__ import annotations

import torch

from paceline.comm.p2p.pair_inbox import PairInbox, ReceiveTerms, ReceiveWork
from paceline.comm.p2p.pair_message import PairMessage
from paceline.errors import PacelineError, WorkerLost

TERMS = ReceiveTerms("rank 0", 60.0, torch.device("cpu"), lambda: None)


class FakeLink:
    """A link whose messages come at a look."""

    name, host = 4, "here"

    def __init__(self, inbox: PairInbox) -> None:
        self.inbox = inbox
        self.coming: list[tuple[int, str]] = []
        self.error: PacelineError | None = None

    def look_for_messages(self, *, last: bool = False) -> None:
        for lane, text in self.coming:
            self.inbox.put_message(0, lane, PairMessage(text, ()))
        self.coming.clear()

    def rest_until(self, work: ReceiveWork, seconds: float) -> None: ...

    def find_loss(self) -> PacelineError | None:
        return self.error


def asked(inbox: PairInbox, link: FakeLink, lane: int) -> ReceiveWork:
    work = ReceiveWork(link, "it", TERMS)
    inbox.request_message(0, lane, work)
    return work


def test_each_lane_is_first_in_first_out() -> None:
    inbox = PairInbox()
    link = FakeLink(inbox)
    early = asked(inbox, link, 1)
    link.coming = [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    link.look_for_messages()
    assert [asked(inbox, link, lane).wait().head for lane in (0, 1, 0)] == ["a", "d", "c"]
    assert early.wait().head == "b"


def test_a_lane_that_is_empty_takes_no_room() -> None:
    inbox = PairInbox()
    link = FakeLink(inbox)
    for lane in range(100):
        work = asked(inbox, link, lane)
        inbox.put_message(0, lane, PairMessage(lane, ()))
        inbox.put_message(0, lane, PairMessage(-lane, ()))
        assert (work.wait().head, asked(inbox, link, lane).wait().head) == (lane, -lane)
    assert not inbox._arrived and not inbox._wanted


def test_what_came_before_the_end_is_received() -> None:
    inbox = PairInbox()
    link = FakeLink(inbox)
    works = [asked(inbox, link, 0) for _ in range(2)]

    class Dies(FakeLink):
        def find_loss(self) -> PacelineError | None:
            # between the look and the question
            self.coming, self.error = [(0, "last")], WorkerLost("rank 4 has died", (4,))
            return self.error

    last = ReceiveWork(Dies(inbox), "it", TERMS)
    inbox.request_message(0, 7, last)
    assert (
        last.done()
        and isinstance(last.exception(), WorkerLost)
        and "rank 0 has not received it from rank 4" in str(last.exception())
    )
    assert works[0].wait().head == "last" and not works[1].done()
