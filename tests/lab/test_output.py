"""The lines of all hosts on one screen, and the last words once."""

from __future__ import annotations

from paceline.lab.output import LauncherOutput, OutputSorter


def feed(*parts: tuple[int, int, bytes], placed: dict[int, int] | None = None) -> str:
    """What is shown of (host, descriptor, bytes)."""
    desk = OutputSorter(["a", "b"], placed or {0: 0, 1: 1}, show=False)
    sources = {
        (host, descriptor): LauncherOutput(host, desk, descriptor)
        for host in (0, 1)
        for descriptor in (1, 2)
    }
    for host, descriptor, data in parts:
        sources[host, descriptor].take_bytes(data)
    for source in sources.values():
        source.flush_line()
    desk.show_last_words()
    return desk.all_text


def test_lines_have_host_and_rank():
    assert feed((0, 1, b"[0] x\n[2] y\n"), (1, 2, b"[1] z\n")) == "[a 0] x\n[a 2] y\n[b 1] z\n"


def test_parts_of_lines():
    assert feed((0, 1, b"[0] x"), (1, 1, b"[1] y\n"), (0, 1, b"z\n")) == "[b 1] y\n[a 0] xz\n"


def test_carriage_returns_keep_their_prefix():
    assert feed((0, 1, b"[0] 10%\r[0] 20%\r\n")) == "[a 0] 10%\r[a 0] 20%\r\n"


def test_a_script_that_writes_like_a_launcher():
    assert (
        feed((0, 1, b"[0] [1] x\n[0] paceline: host b is gone\n"))
        == "[a 0] [1] x\n[a 0] paceline: host b is gone\n"
    )


def test_launchers_that_say_the_same_are_heard_once():
    assert (
        feed((0, 2, b"paceline: no\n"), (1, 2, b"paceline: no\n"), (1, 2, b"paceline: yes\n"))
        == "[a] paceline: no\n[b] paceline: yes\n"
    )


def test_what_is_for_who_starts_hosts_by_hand_is_left_out():
    """A lab starts them all; what a script writes is shown."""
    waits = (
        b"paceline: waits at 10.77.0.1:29400 for 1 host more, 29 s at most (here: a); there, run: "
        b"paceline run x.py\n"
    )
    calls = (
        b"paceline: nobody answers at 10.77.0.1:29400 yet (Connection refused); "
        b"on the host with that address, run: paceline run x.py\n"
    )
    assert (
        feed(
            (0, 2, waits),
            (1, 2, calls),
            (1, 2, b"paceline: has come to 10.77.0.1:29400, and waits\n"),
        )
        == ""
    )
    assert feed((0, 2, b"[0] " + waits)) == "[a 0] " + waits.decode()


def test_the_reason_stands_once_and_last():
    words = b"paceline: what rank 1 said last:\n[1] Traceback\n[1] ValueError: x\n"
    verdict = (
        b"paceline: rank 1 on b failed with exit code 1 (ValueError); its last words are above\n"
    )
    shown = feed(
        (1, 2, b"[1] ValueError: x\n" + verdict),
        (0, 2, words + verdict),
        (0, 1, b"[0] late\n"),
        (1, 1, b"[1] later\n"),
    )
    assert shown.splitlines() == [
        "[b 1] ValueError: x",
        "[a 0] late",
        "[b 1] later",
        "paceline: what rank 1 said last:",
        "[b 1] Traceback",
        "[b 1] ValueError: x",
        verdict.decode().strip(),
    ]


def test_a_lost_host_is_said_last():
    shown = feed((0, 2, b"paceline: host b is gone: silence\n"), (0, 1, b"[0] late\n"))
    assert shown == "[a 0] late\npaceline: host b is gone: silence\n"
