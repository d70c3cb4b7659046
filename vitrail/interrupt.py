"""Handling of Ctrl-C, SIGTERM and SIGHUP: training saves and stops after the current step; other work stops at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from vitrail.errors import CommandError

if TYPE_CHECKING:  # commands without a network do not wait for torch to be imported
    from vitrail.distributed import Ranks


class Interrupted(CommandError):
    """Raised when a signal stops a command."""

    def __init__(self, signal_number: int):
        self.exit_code = 128 + signal_number  # the convention of shells
        self.advice = ""  # how to resume
        super().__init__(signal.Signals(signal_number).name)

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int]]:
        return Interrupted, (self.exit_code - 128,)  # pickled for the other processes of a run

    def __str__(self) -> str:
        return f"stopped{self.advice}"


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a command: SIGINT, SIGTERM and, unless it is ignored as under `nohup`, SIGHUP."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has no SIGHUP
        signals.append(signal.SIGHUP)
    return signals


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit with the message "stopped" at SIGTERM and SIGHUP, for a command that has nothing to save yet.

    Ctrl-C raises KeyboardInterrupt. During imports it exits directly, since imported code may catch the exception.
    """
    previous, process = {}, os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        is_parent = os.getpid() == process  # not a forked child that still has these handlers
        if is_parent and number == signal.SIGINT and not _importing(frame):
            raise KeyboardInterrupt
        if is_parent and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # stderr was closed
                os.write(2, b"stopped\n")
        os._exit(128 + number)

    if threading.current_thread() is threading.main_thread():  # the only thread that may set handlers
        for number in stop_signals():
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                previous[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class _StopNow(BaseException):
    """A BaseException, since libraries catch Exception."""


class Interrupts:
    """Context manager that records the first stop signal, for `check` to raise between steps.

    A second Ctrl-C stops the program without saving. It is ignored
    - within `REPEAT_WINDOW` of the first: `timeout` signals a process and then its group, which is the same process;
    - under torchrun, which forwards signals that the cluster has often sent to every process already.
    A second SIGTERM is ignored too: a program that wants to stop the run without saving can send SIGKILL.
    """

    REPEAT_WINDOW = 1.0  # seconds

    def __init__(self) -> None:
        self.caught: int | None = None
        self._caught_at = 0.0
        self._interruptible = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # the only thread that may set handlers
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _catch(self, number: int, _: FrameType | None) -> None:
        # During a fork, Python may call this with the signal blocked, and an exception raised here would be lost. Send
        # the signal again: it is delivered once unblocked.
        if sys.platform != "win32" and hasattr(signal, "pthread_sigmask"):
            if number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
                signal.pthread_kill(threading.get_ident(), number)
                return
        if self.caught is None:
            self._caught_at, self.caught = time.monotonic(), number
            if self._interruptible:
                raise _StopNow
        elif number == signal.SIGINT and self._previous[number] != signal.SIG_IGN and self._is_second_request():
            self.__exit__()
            with contextlib.suppress(OSError):  # stderr was closed
                os.write(2, b"stopped by a second Ctrl-C, without saving\n")  # sys.stderr may be in use
            signal.raise_signal(number)

    def _is_second_request(self) -> bool:
        return time.monotonic() - self._caught_at > self.REPEAT_WINDOW and "TORCHELASTIC_RUN_ID" not in os.environ

    @contextlib.contextmanager
    def interruptible(self, ranks: Ranks | None = None) -> Iterator[None]:
        """Let a signal stop the enclosed work at once, where there is nothing to save.

        With several `ranks`, the work runs on to the next `check`, since all processes have to stop together.
        """
        if ranks is not None and ranks.world_size > 1:
            yield
            return
        self.check()
        previous, self._interruptible = self._interruptible, True
        try:
            yield
            self._interruptible = previous
        except BaseException:
            self._interruptible = previous
            if self.caught:  # a library may have replaced the exception
                raise Interrupted(self.caught) from None
            raise

    def check(self, ranks: Ranks | None = None) -> None:
        """Raise `Interrupted` if a signal came. With `ranks`, a collective call: if one came to any process."""
        caught = self.caught if ranks is None else ranks.all_reduce_max(self.caught or 0)[0]
        if caught:
            raise Interrupted(caught)
