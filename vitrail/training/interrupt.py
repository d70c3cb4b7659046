"""Ctrl-C, SIGTERM and a closed terminal: the run ends at the next step with its work saved."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands that only look at images do not wait for torch
    from vitrail.training.parallel import Ranks


class Interrupted(Exception):
    """Raised between batches when the user or the system asked to stop."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        self.advice = ""  # how to go on
        super().__init__(signal.Signals(signal_number).name)

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int]]:
        return Interrupted, (self.signal_number,)  # for the other processes of a run

    def __str__(self) -> str:
        return f"stopped{self.advice}"


def taken_signals() -> list[signal.Signals]:
    """Those that ask a program to end: Ctrl-C, SIGTERM and, unless `nohup` made sure that nobody minds, SIGHUP, which
    a closed terminal sends."""
    taken = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has none
        taken.append(signal.SIGHUP)
    return taken


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
        if self.caught is None:
            self._when, self.caught = time.monotonic(), number
        elif number == signal.SIGINT and self._before[number] != signal.SIG_IGN and self._meant_anew():
            self.__exit__()
            with contextlib.suppress(OSError):  # nobody there to read it
                os.write(2, b"stopped by a second Ctrl-C, without saving\n")  # sys.stderr may be in use
            signal.raise_signal(number)

    def _meant_anew(self) -> bool:
        return time.monotonic() - self._when > self.ECHO and "TORCHELASTIC_RUN_ID" not in os.environ

    def check(self, ranks: Ranks | None = None) -> None:
        """Stop if a signal came; with `ranks`, which all processes must give together, if it came to any of them."""
        caught = self.caught if ranks is None else ranks.largest(self.caught or 0)[0]
        if caught:
            raise Interrupted(caught)
