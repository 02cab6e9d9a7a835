"""The channel of a call: messages with files, what becomes of those that nobody takes, and that
nothing stays open.
"""

from __future__ import annotations

import os

from paceline.cluster.control.calls import CallChannel, make_channel, make_verdict_sender
from paceline.cluster.hosts.peers import Failure


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_messages_and_their_files() -> None:
    before = descriptors()
    mine, theirs = make_channel()
    sender = CallChannel.from_descriptor(theirs.fileno())
    assert mine.receive() is None
    assert sender.send("result", {"number": 1}, lambda file: file.write(b"x" * 1_000_000))
    assert sender.send("called", {"number": 2})
    first, second = mine.receive(), mine.receive()
    assert first is not None and second is not None and first.body is not None
    with first.body as body:
        assert (first.kind, first.fields, body.read()) == (
            "result",
            {"number": 1},
            b"x" * 1_000_000,
        )
    assert (second.kind, second.fields, second.body) == ("called", {"number": 2}, None)
    assert mine.receive() is None
    sender.close()
    theirs.close()
    assert mine.receive() is None  # nobody is left who could send
    mine.close()
    assert descriptors() == before


def test_an_end_that_is_inherited_goes_to_no_program() -> None:
    mine, theirs = make_channel()
    os.set_inheritable(theirs.fileno(), True)
    sender = CallChannel.from_descriptor(theirs.fileno())
    assert not os.get_inheritable(theirs.fileno()) and not os.get_inheritable(sender.fileno())
    for end in (mine, sender, theirs):
        end.close()


def test_who_doesn_t_wait_drops_and_who_waits_finds_out_that_nobody_reads() -> None:
    mine, theirs = make_channel()
    sender = CallChannel(theirs)
    sent = [sender.send("status", {"step": step}, waits=False) for step in range(1000)]
    assert sent[0] and not sent[-1]
    heard = []
    while (message := mine.receive()) is not None:
        heard.append(message.fields["step"])
    assert heard == list(range(len(heard))) and len(heard) == sum(sent)
    assert sender.send("status", {"step": 1000}, waits=False)
    mine.close()
    assert not sender.send("result", {"number": 0}, lambda file: file.write(b"late"))
    sender.close()


def test_a_launcher_tells_who_failed_first() -> None:
    assert make_verdict_sender(None) is None
    mine, theirs = make_channel()
    tell = make_verdict_sender((0, theirs.fileno()))
    assert tell is not None
    tell(Failure(3, "here", 1, "failed with exit code 1", tail="so it was"))
    message = mine.receive()
    assert message is not None and message.body is not None
    with message.body as body:
        assert message.kind == "verdict" and body.read() == b"so it was"
    assert message.fields == {"number": 3, "line": "rank 3 on here failed with exit code 1"}
    mine.close()
    theirs.close()
