"""SIGTERM as a request: who hears it, and who dies of it as usual."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from paceline.cluster.control.term_request import TermRequest
from paceline.cluster.discover import Place
from tests.harness.jobs import wait_for

SAVING = Place(saves_on_term=True, grace_seconds=600.0)


@pytest.fixture(autouse=True)
def _own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def run_in_child(work: object) -> int:
    """How a forked process ends in which `work` is called."""
    child = os.fork()
    if child == 0:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_it_is_noted_once_and_survived() -> None:
    def work() -> None:
        notes: list[int] = []
        request = TermRequest(SAVING, lambda: notes.append(1))
        assert request.begin_listening() and not request.is_asked
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: bool(notes))
        os._exit(7 if request.is_asked and notes == [1] else 1)

    assert run_in_child(work) == 7


def test_the_process_ends_when_its_seconds_are_over() -> None:
    def work() -> None:
        request = TermRequest(Place(saves_on_term=True, grace_seconds=0.05))
        request.begin_listening()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(60)

    assert run_in_child(work) == 128 + signal.SIGTERM


def test_a_forked_process_dies_of_it() -> None:
    request = TermRequest(SAVING)
    request.begin_listening()
    assert run_in_child(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM
    request.stop_listening()
    assert not request.is_asked and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_script_stays() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    request = TermRequest(SAVING)
    assert not request.begin_listening() and request.is_foreign
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_without_the_option_nothing_is_changed() -> None:
    assert not TermRequest(Place()).begin_listening()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_another_thread_can_only_be_asked_through_a_descriptor() -> None:
    read_fd, write_fd = os.pipe()
    request = TermRequest(Place(saves_on_term=True, save_request_fd=read_fd))
    listening: list[bool] = []
    thread = threading.Thread(target=lambda: listening.append(request.begin_listening()))
    thread.start()
    thread.join()
    assert listening == [True] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os.write(write_fd, b"x")
    wait_for(lambda: request.is_asked)
    for descriptor in (read_fd, write_fd):
        os.close(descriptor)


def test_what_was_asked_before_is_known_at_once() -> None:
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"x")
    request = TermRequest(Place(save_request_fd=read_fd))
    assert request.begin_listening() and request.is_asked
