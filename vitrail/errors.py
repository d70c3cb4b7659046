"""What a user is told when something they gave cannot be used: one sentence, with the likely right word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A problem the user can fix. The command line prints it as one sentence, without a traceback."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when a known word is close, else an empty string."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else ""
