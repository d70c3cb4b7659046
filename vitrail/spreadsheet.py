"""Writing CSV that is safe to open in a spreadsheet, and reading CSV that a spreadsheet has saved.

A text cell that a spreadsheet would run as a formula gets a leading apostrophe, which `unescape_cell` removes. Numbers
are unchanged.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

APOSTROPHE = "'"
_FORMULA = re.compile(r"['\s\x00-\x1f]*[=+\-@\uff1d\uff0b\uff0d\uff20]|'*[\t\r\n]")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SEPARATORS = re.compile(r"[;\t]")  # separate cells where the comma is the decimal separator


def escape_cell(text: str) -> str:
    """Put an apostrophe before a cell that a spreadsheet would run as a formula."""
    return APOSTROPHE + text if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def unescape_cell(text: str) -> str:
    """Undo `escape_cell`."""
    return text[1:] if text.startswith(APOSTROPHE) and _FORMULA.match(text) else text


class SafeCsvWriter:
    """A csv.writer that escapes formulas, and quotes rows that contain other separators."""

    def __init__(self, file: TextIO):
        self._default, self._quoted = csv.writer(file), csv.writer(file, quoting=csv.QUOTE_ALL)

    def writerow(self, cells: Sequence[str]) -> None:
        safe = [escape_cell(cell) for cell in cells]
        (self._quoted if any(map(_SEPARATORS.search, safe)) else self._default).writerow(safe)

    def writerows(self, rows: Iterable[Sequence[str]]) -> None:
        for row in rows:
            self.writerow(row)


def csv_bytes(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> bytes:
    """Return a CSV file as bytes. Parts of file names that are not valid UTF-8 are kept as they are."""
    text = io.StringIO(newline="")
    table = SafeCsvWriter(text)
    table.writerow(titles)
    table.writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


def read_csv_rows(text: str) -> Iterator[list[str]]:
    """Yield the non-empty rows, with the separator taken from the first row. Raises csv.Error.

    Spreadsheets separate cells by semicolons where the comma is the decimal separator.
    """
    separator = max(",;\t", key=text.split("\n", 1)[0].count)
    yield from (row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True) if row)
