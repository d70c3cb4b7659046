"""Consoles that escape control characters and markup in names and texts read from files."""

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

# Control characters (C0, DEL, C1), line and paragraph separators, and bidirectional overrides. The marks that words in
# Arabic, Hebrew and Persian and emoji need are not among them.
_CONTROL = "\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
_JOINERS = dict.fromkeys((0x200C, 0x200D))
_UNSAFE = re.compile(f"[{_CONTROL}]")
_UNSAFE_TEXT = re.compile(f"(?![\n\t])[{_CONTROL}]")


def printable(name: str) -> str:
    r"""Return a name on one line with control characters escaped, as in the six characters "a\x1b" for an a and ESC."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), name)


def printable_text(text: str) -> str:
    """Return text with control characters escaped, except newlines and tabs."""
    return _UNSAFE_TEXT.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_json(text: str) -> str:
    """Return JSON with control characters as JSON escapes."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def is_printable(name: str) -> bool:
    """Like str.isprintable, but accepts the joiners that Persian words and some emoji contain."""
    return name.translate(_JOINERS).isprintable()


def escape(name: str) -> str:
    """Escape text for use in console markup."""
    return markup.escape(printable(name))


class SafeConsole(Console):
    """Rich console that escapes control characters in everything it prints."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, emoji=False, **options)  # ":bomb:" in a name stays text

    def render_str(self, text: str, **options: Any) -> Text:
        text = printable_text(text)
        try:
            return super().render_str(text, **options)
        except MarkupError:  # invalid markup must not end a run
            return super().render_str(text, **{**options, "markup": False})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            if part.control or not _UNSAFE_TEXT.search(part.text):
                yield part
            else:
                yield Segment(printable_text(part.text), part.style)


class _Console(SafeConsole):
    def on_broken_pipe(self) -> None:
        """Let `main` handle a reader that closed the pipe, as `head` does."""
        raise BrokenPipeError


class _ErrorTolerantStream:
    """Stream that ignores write errors: a closed terminal or pipe, a full disk."""

    def __init__(self, stream: IO[str]):
        self.stream = stream

    def write(self, text: str) -> int:
        with self._ignore_errors():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._ignore_errors():
            self.stream.flush()

    @contextmanager
    def _ignore_errors(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # a slow reader
            return
        except (OSError, ValueError):  # ValueError: the stream is closed
            with suppress(OSError, ValueError, AttributeError):  # no file descriptor
                number = self.stream.fileno()
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, number)
                os.close(devnull)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _ErrorTolerantConsole(SafeConsole):
    @property
    def file(self) -> IO[str]:
        return cast(IO[str], _ErrorTolerantStream(super().file))

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new


def make_console(*, stderr: bool = False, ignore_write_errors: bool = False, quiet: bool = False) -> Console:
    """Return a console for a command's output. Lines are never wrapped or highlighted, so paths can be copied.

    Control characters in file names are escaped. With `ignore_write_errors`, a run continues when its output can no
    longer be written, for example after the terminal was closed."""
    return (_ErrorTolerantConsole if ignore_write_errors else _Console)(stderr=stderr, soft_wrap=True, quiet=quiet)
