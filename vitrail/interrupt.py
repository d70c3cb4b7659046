"""Ctrl-C, SIGTERM and a closed terminal: the run ends at the next step with its work saved, and where there is
nothing to save, at once."""

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

if TYPE_CHECKING:  # commands that only look at images do not wait for torch
    from vitrail.distributed import Ranks


class Interrupted(CommandError):
    """Raised between batches when the user or the system asked to stop."""

    def __init__(self, signal_number: int):
        self.exit_code = 128 + signal_number  # as shells have it
        self.advice = ""  # how to go on
        super().__init__(signal.Signals(signal_number).name)

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int]]:
        return Interrupted, (self.exit_code - 128,)  # for the other processes of a run

    def __str__(self) -> str:
        return f"stopped{self.advice}"


def taken_signals() -> list[signal.Signals]:
    """Those that ask a program to end: Ctrl-C, SIGTERM and, unless `nohup` made sure that nobody minds, SIGHUP, which
    a closed terminal sends."""
    taken = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has none
        taken.append(signal.SIGHUP)
    return taken


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """For a command until it has something to save: SIGTERM and a closed terminal end it with one word. So does Ctrl-C
    in the seconds that imports take, since imported code may swallow an exception or make another one of it."""
    before, process = {}, os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        own = os.getpid() == process  # and not a child that has not set handlers of its own yet
        if own and number == signal.SIGINT and not _importing(frame):
            raise KeyboardInterrupt
        if own and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # nobody there to read it
                os.write(2, b"stopped\n")
        os._exit(128 + number)

    if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
        for number in taken_signals():
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class _Now(BaseException):
    """No Exception, which libraries take for an answer."""


class Interrupts:
    """A context that remembers the first signal; a later Ctrl-C falls through to what was there before.

    Not what comes at once after the first: `timeout` and others signal a process, then its group, which is it again.
    Not under torchrun, which passes on what a cluster often has told every process already and has its own patience.
    And no SIGTERM: it comes from programs, which have SIGKILL for when they mean it.
    """

    ECHO = 1.0  # seconds

    def __init__(self) -> None:
        self.caught: int | None = None
        self._when = 0.0
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in taken_signals():
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _catch(self, number: int, _: FrameType | None) -> None:
        # While a process is forked, Python may run this with the signal blocked, and an exception from here would be
        # lost on its way: the signal comes again once it is let through.
        if sys.platform != "win32" and hasattr(signal, "pthread_sigmask"):
            if number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
                signal.pthread_kill(threading.get_ident(), number)
                return
        if self.caught is None:
            self._when, self.caught = time.monotonic(), number
            if self._at_once:
                raise _Now
        elif number == signal.SIGINT and self._before[number] != signal.SIG_IGN and self._meant_anew():
            self.__exit__()
            with contextlib.suppress(OSError):  # nobody there to read it
                os.write(2, b"stopped by a second Ctrl-C, without saving\n")  # sys.stderr may be in use
            signal.raise_signal(number)

    def _meant_anew(self) -> bool:
        return time.monotonic() - self._when > self.ECHO and "TORCHELASTIC_RUN_ID" not in os.environ

    @contextlib.contextmanager
    def at_once(self, ranks: Ranks | None = None) -> Iterator[None]:
        """While there is nothing to save: a signal stops the work wherever it is. `ranks`: the work is that of all
        processes together, which then go on to the next `check` if there are several."""
        if ranks is not None and ranks.world > 1:
            yield
            return
        self.check()
        before, self._at_once = self._at_once, True
        try:
            yield
            self._at_once = before
        except BaseException:
            self._at_once = before
            if self.caught:  # whatever has become of it on its way
                raise Interrupted(self.caught) from None
            raise

    def check(self, ranks: Ranks | None = None) -> None:
        """Stop if a signal came; with `ranks`, which all processes must give together, if it came to any of them."""
        caught = self.caught if ranks is None else ranks.largest(self.caught or 0)[0]
        if caught:
            raise Interrupted(caught)
