"""SIGTERM as a request to a worker: save a checkpoint, and end within some seconds.

SIGTERM -> handler ----------------> pipe -+-> thread: the request is noted;
Ray     -> `Place.save_request_fd` --------+   after SIGTERM it ends the process when
                                               the seconds are over
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from paceline.cluster.discover import Place

EXIT_CODE = 128 + signal.SIGTERM
_STOP, _TERM = b"s", b"t"


class TermRequest:
    """Whether this worker was asked to save and end.

    Invariants: `is_asked` never becomes false again. `_waker_fd` is open while `is_listening`.

    Args:
        place: Place of this worker.
        note: Called in the thread, once, when the request comes. Default: nothing.
    """

    def __init__(self, place: Place, note: Callable[[], None] = lambda: None) -> None:
        self._note, self._process = note, os.getpid()
        self._handles_signals, self._seconds = place.saves_on_term, place.grace_seconds
        self._request_fd = place.save_request_fd
        self._waker_fd = -1
        self.is_asked = False
        self.is_listening = False
        self.is_foreign = False  # the script handles SIGTERM itself

    def begin_listening(self) -> bool:
        """Begin to listen for the request, if it can come. Returns whether it can.

        A handler of the script's own stays. Handlers can be set in the main thread alone.
        """
        handles = self._handles_signals and threading.current_thread() is threading.main_thread()
        if handles and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            self.is_foreign, handles = True, False
        if self.is_listening or not (handles or self._request_fd is not None):
            return self.is_listening
        if self._request_fd is not None:
            self.is_asked = bool(select.select([self._request_fd], [], [], 0)[0])
        wake_fd, self._waker_fd = os.pipe()
        os.set_blocking(self._waker_fd, False)
        self.is_listening = True
        threading.Thread(
            target=self._wait_for_request, args=(wake_fd,), name="paceline SIGTERM", daemon=True
        ).start()
        if handles:
            signal.signal(signal.SIGTERM, self._handle_signal)
        return True

    def stop_listening(self) -> None:
        """Give SIGTERM its usual effect again.

        After a request the process is still ended when its seconds are over.
        """
        if not self.is_listening:
            return
        self.is_listening = False
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) == self._handle_signal:
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self.is_asked else signal.SIG_DFL)
        # The thread has ended if Ray has asked.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._waker_fd, _STOP)
        os.close(self._waker_fd)

    def _handle_signal(self, signum: int, frame: object) -> None:
        if os.getpid() != self._process:
            # A process that the script has forked, such as a reader of a DataLoader.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif not self.is_asked:
            self.is_asked = True
            os.write(self._waker_fd, _TERM)

    def _wait_for_request(self, wake_fd: int) -> None:
        """Wait for the request or the end of the run, and then for the end of the seconds."""
        poll, request_fd = select.poll(), self._request_fd
        for descriptor in (wake_fd, *(() if request_fd is None else (request_fd,))):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        word = os.read(wake_fd, 1) if wake_fd in ready else b""
        os.close(wake_fd)
        if word == _STOP:
            return
        self.is_asked = True
        self._note()
        # Who asked through the descriptor looks after the time.
        if word == _TERM:
            threading.Event().wait(self._seconds)
            what = "no checkpoint was written" if self.is_listening else "the script didn't end"
            text = f"paceline: {what} within {self._seconds:g} s after SIGTERM"
            print(text, file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)
