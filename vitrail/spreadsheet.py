"""CSV tables that a spreadsheet opens without running what stands in them, and tables that one has written.

A text cell that a spreadsheet would take for a formula gets an apostrophe before it, and `unescape_cell` takes exactly
that away again. Cells that are numbers stay as they are.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

MARK = "'"
_FORMULA = re.compile(r"['\s\x00-\x1f]*[=+\-@\uff1d\uff0b\uff0d\uff20]|'*[\t\r\n]")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SPLITS = re.compile(r"[;\t]")  # where the comma is the decimal sign, spreadsheets divide cells here


def escape_cell(text: str) -> str:
    return MARK + text if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def unescape_cell(text: str) -> str:
    """What `escape_cell` was given."""
    return text[1:] if text.startswith(MARK) and _FORMULA.match(text) else text


class SafeCsvWriter:
    """A CSV file under way."""

    def __init__(self, file: TextIO):
        self._usual, self._quoted = csv.writer(file), csv.writer(file, quoting=csv.QUOTE_ALL)

    def writerow(self, cells: Sequence[str]) -> None:
        safe = [escape_cell(cell) for cell in cells]
        (self._quoted if any(map(_SPLITS.search, safe)) else self._usual).writerow(safe)

    def writerows(self, rows: Iterable[Sequence[str]]) -> None:
        for row in rows:
            self.writerow(row)


def csv_bytes(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> bytes:
    """A whole file. File names need not be text: what of them is not goes in as it is."""
    text = io.StringIO(newline="")
    table = SafeCsvWriter(text)
    table.writerow(titles)
    table.writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


def read_csv_rows(text: str) -> Iterator[list[str]]:
    """The rows that have cells, as they stand; raises csv.Error. Spreadsheets write semicolons where the comma is the
    decimal sign, so the first row tells what divides cells."""
    mark = max(",;\t", key=text.split("\n", 1)[0].count)
    yield from (row for row in csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True) if row)
