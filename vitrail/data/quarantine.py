"""The list of images that training leaves out: `vitrail check` writes it, and people may edit it.

A CSV table with the columns name, digest and reason. An image is left out when both its name and its content are
those of a row, so a file that was mended or replaced is used again; a row without a digest leaves out by name alone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.atomic import atomic_write
from vitrail.data.files import Entry, read_file
from vitrail.data.sources.image_list import counted, quoted
from vitrail.errors import UserError, os_errors_as, user_path
from vitrail.spreadsheet import csv_bytes, read_csv_rows, unescape_cell

TITLES = ("name", "digest", "reason")
UNREAD = "0" * 32


class QuarantineRow(NamedTuple):
    name: str
    digest: str  # hexadecimal, of the content; UNREAD for what could not be read; empty: whatever the content
    reason: str


def write_quarantine(path: Path, rows: Sequence[QuarantineRow]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_bytes(csv_bytes(TITLES, rows))


@dataclass(frozen=True)
class Quarantine:
    path: str
    digests: dict[str, str]  # name -> digest

    @classmethod
    def read(cls, path: str | Path) -> Quarantine:
        with os_errors_as(f"the quarantine list '{path}' cannot be read"):
            text = read_file(user_path(path)).decode("utf-8-sig", "surrogateescape")
        try:
            rows = list(read_csv_rows(text))
        except csv.Error as error:
            raise UserError(f"the quarantine list '{path}' is not a proper CSV table: {error}") from None
        titles = [title.strip().lower() for title in rows[0]] if rows else []
        if not {"name", "digest"} <= set(titles):
            raise UserError(f"the quarantine list '{path}' needs the columns name and digest in its first row")
        name, digest = titles.index("name"), titles.index("digest")
        listed: dict[str, str] = {}
        for number, row in enumerate(rows[1:], 2):
            if len(row) <= max(name, digest) or not re.fullmatch(r"([0-9a-fA-F]{32})?", row[digest].strip()):
                raise UserError(f"the quarantine list '{path}' has no name and digest of 32 digits in row {number}")
            listed[unescape_cell(row[name])] = row[digest].strip().lower()
        return cls(str(path), listed)

    def exclude(
        self, entries: Sequence[Entry], digests: np.ndarray, rows: Sequence[int], notes: list[str]
    ) -> list[int]:
        """The `rows` that are not listed; what was done is noted."""
        if not self.digests:
            return list(rows)
        found = {row for row, entry in enumerate(entries) if entry.name in self.digests}
        same = {row for row in found if self.digests[entries[row].name] in ("", digests[row].tobytes().hex())}
        kept = [row for row in rows if row not in same]
        if not kept:
            raise UserError(f"'{self.path}' lists every image that can be used: nothing is left")
        if not found:
            notes.append(f"'{self.path}' lists no image of this data: was it made for another?")
        if len(kept) < len(rows):
            notes.append(f"Left out {counted(len(rows) - len(kept), 'image')} that '{self.path}' lists.")
        changed = [entries[row].name for row in sorted(set(rows) & (found - same))]
        if changed:
            which = f"{counted(len(changed), 'image')} that '{self.path}' lists"
            notes.append(f"Used {which}, since the content is another one now: {quoted(changed)}.")
        return kept
