"""What a terminal shows: names and texts out of files never act on it, and never pass for markup."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from rich import markup
from rich.console import Console, ConsoleOptions, RenderableType
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

# Control characters (C0, DEL, C1), line and paragraph separators, and what turns the direction of text around. Marks
# that words in Arabic, Hebrew, Persian or emoji need are none of these.
_ACTING = "\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
_JOINERS = dict.fromkeys((0x200C, 0x200D))
_UNSAFE = re.compile(f"[{_ACTING}]")
_UNSAFE_TEXT = re.compile(f"(?![\n\t])[{_ACTING}]")


def printable(name: str) -> str:
    r"""A name on one line, its control characters as escapes: "a\x1b[2J" is shown as a, a backslash, and so on."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), name)


def printable_text(text: str) -> str:
    """The same for text that may have several lines."""
    return _UNSAFE_TEXT.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_json(text: str) -> str:
    """JSON on one line, with what it may hold raw and a terminal should not get as JSON's own escapes."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def is_printable(name: str) -> bool:
    """Whether a name is text that can be seen. Joiners, which Persian words and some emoji are written with, are part
    of such text."""
    return name.translate(_JOINERS).isprintable()


def escape(name: str) -> str:
    """A name or a sentence to put into the markup of a console."""
    return markup.escape(printable(name))


class SafeConsole(Console):
    """The console of every command. Whatever reaches it, the terminal gets text and rich's own styles alone."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, emoji=False, **options)  # ":bomb:" in a name is no picture

    def render_str(self, text: str, **options: Any) -> Text:
        text = printable_text(text)
        try:
            return super().render_str(text, **options)
        except MarkupError:  # better unstyled than a run that ends over its own words
            return super().render_str(text, **{**options, "markup": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            if part.control or not _UNSAFE_TEXT.search(part.text):
                yield part
            else:
                yield Segment(printable_text(part.text), part.style)


class _Console(SafeConsole):
    def on_broken_pipe(self) -> None:
        """The reader of our output went away, as `head` does: that is for `main` to take, and no failure."""
        raise BrokenPipeError


class _Lasting:
    """A stream that takes words also when the terminal was closed, the reader is gone or the disk is full."""

    def __init__(self, stream: IO[str]):
        self.stream = stream

    def write(self, text: str) -> int:
        with self._or_never_again():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._or_never_again():
            self.stream.flush()

    @contextmanager
    def _or_never_again(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # a reader that is slow for a moment
            return
        except (OSError, ValueError):  # ValueError: closed by ourselves
            with suppress(OSError, ValueError, AttributeError):  # a stream without a file
                number = self.stream.fileno()
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _LastingConsole(SafeConsole):
    @property
    def file(self) -> IO[str]:
        return cast(IO[str], _Lasting(super().file))

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new


def make_console(*, stderr: bool = False, ignore_write_errors: bool = False, quiet: bool = False) -> Console:
    """Return a console for a command's output. Lines are never wrapped or highlighted, so paths can be copied.

    Control characters in file names are escaped. With `ignore_write_errors`, a run continues when its output can no
    longer be written, for example after the terminal was closed."""
    return (_LastingConsole if ignore_write_errors else _Console)(stderr=stderr, soft_wrap=True, quiet=quiet)
