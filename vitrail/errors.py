"""What a user is told when something they gave cannot be used: one sentence, with the likely right word."""

from __future__ import annotations

import difflib
import errno
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path


class CommandError(Exception):
    """What ends a command with one sentence and no traceback. Of several processes all end alike."""

    exit_code = 2
    reported: bool | None = None  # whether another process of the run says it; none: that is not known yet


class UserError(CommandError):
    """A problem the user can fix."""


def error_reason(error: Exception) -> str:
    """What went wrong, without the number and the path that Python puts around an OSError."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def os_errors_as(what: str) -> Iterator[None]:
    """A full disk, a folder without rights and the like, inside, as one sentence: `what`, and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error_reason(error)}") from error


def user_path(path: str | Path) -> Path:
    """A path as the user gave it, with ~ for a home folder. Whether anything is there is for others to see; what can be
    no path at all is found here, before any work."""
    try:
        place = Path(path).expanduser()
    except RuntimeError:  # nobody of that name has a home: then it is the name of a file
        place = Path(path)
    try:
        place.lstat()
    except ValueError:
        raise UserError(f"'{path}' cannot be a path, since it holds a null character") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            start, length = str(path)[:60], len(str(path))
            raise UserError(f"'{start}...', with {length:,} characters, is no path: {error.strerror}") from None
    return place


class Note(UserWarning):
    """What a user should know though all goes on: a warning in Python, one sentence on standard error of a command."""


_warned: set[str] = set()


def warn_once(old: str, new: str) -> None:
    """Warn, the first time, that `old` is the name of an earlier version. It keeps working."""
    note_once(f"{old} is called {new} now; the old name still works")


def note_once(message: str) -> None:
    """Warn, unless the same message was printed before."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(Note(message), stacklevel=3)


def check_integer(name: str, value: object, what: str = "a whole number", least: int = 1) -> None:
    """That an argument called `name` is a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UserError(f"{name} is {what}, at least {least}, not {value!r}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when a known word is close, else an empty string."""
    close = _closest(word, known)
    return f"; did you mean '{close}'?" if close else ""


def did_you_mean_path(path: Path) -> str:
    """The same for a path that is not there, by what lies beside it."""
    close = _closest(path.name, [other.name for other in path.parent.iterdir()]) if path.parent.is_dir() else ""
    return f"; did you mean '{path.with_name(close)}'?" if close else ""


def _closest(word: str, known: Iterable[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else ""
