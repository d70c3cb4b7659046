"""Errors and notes for users, and suggestions of the nearest valid name."""

from __future__ import annotations

import difflib
import errno
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path


class CommandError(Exception):
    """Ends a command with a message and no traceback, on every rank of a distributed run."""

    exit_code = 2
    reported: bool | None = None  # whether another process has printed it; None: unknown


class UserError(CommandError):
    """A problem the user can fix."""


def error_reason(error: Exception) -> str:
    """Return the message of an error, for an OSError without its number and path."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def os_errors_as(what: str) -> Iterator[None]:
    """Turn an OSError (disk full, no permission, ...) into a UserError: `what`, then the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error_reason(error)}") from error


def user_path(path: str | Path) -> Path:
    """Expand ~ in a path that a user passed, and reject invalid paths. The path need not exist."""
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:  # no user of that name: a file name that starts with ~
        expanded = Path(path)
    try:
        expanded.lstat()
    except ValueError:
        raise UserError(f"'{path}' is not a valid path: it contains a null character") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            start, length = str(path)[:60], len(str(path))
            raise UserError(f"'{start}...' ({length:,} characters) is not a valid path: {error.strerror}") from None
    return expanded


class Note(UserWarning):
    """A message for users that is no error: a warning in Python, a line on standard error of a command."""


_warned: set[str] = set()


def warn_once(old: str, new: str) -> None:
    """Warn, once per process, that a name was renamed. The old name keeps working."""
    note_once(f"{old} was renamed to {new}; the old name still works")


def note_once(message: str) -> None:
    """Warn, unless the same message was already printed. Of several processes, only the first warns.

    The warning has the file and line of the caller outside vitrail."""
    if message in _warned or os.environ.get("RANK", "0") != "0":
        return
    _warned.add(message)
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("vitrail."):
        level, frame = level + 1, frame.f_back
    warnings.warn(Note(message), stacklevel=level)


def check_integer(name: str, value: object, what: str = "an integer", least: int = 1) -> None:
    """Raise a UserError unless the argument `name` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UserError(f"{name} must be {what}, at least {least}, not {value!r}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" if a known name is close, else an empty string."""
    close = _closest(word, known)
    return f"; did you mean '{close}'?" if close else ""


def did_you_mean_path(path: Path) -> str:
    """Return the same for a path that does not exist, from the files in its folder."""
    close = _closest(path.name, [sibling.name for sibling in path.parent.iterdir()]) if path.parent.is_dir() else ""
    return f"; did you mean '{path.with_name(close)}'?" if close else ""


def _closest(word: str, known: Iterable[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else ""
