"""The list of images to exclude from training: `vitrail check` writes it, and people may edit it.

A CSV table with the columns name, digest and reason. An image is excluded if both its name and its content match a
row, so an image that was repaired or replaced is used again. A row without a digest matches by name alone.
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
from vitrail.data.sources.data_source import counted, quoted
from vitrail.errors import UserError, os_errors_as, user_path
from vitrail.spreadsheet import csv_bytes, read_csv_rows, unescape_cell

TITLES = ("name", "digest", "reason")
UNREAD = "0" * 32


class QuarantineRow(NamedTuple):
    """One image to exclude."""

    name: str
    digest: str  # of the content, hexadecimal; UNREAD if it could not be read; empty: any content
    reason: str


def write_quarantine(path: Path, rows: Sequence[QuarantineRow]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_bytes(csv_bytes(TITLES, rows))


@dataclass(frozen=True)
class Quarantine:
    """The digests of the images to exclude, by name."""

    path: str
    digests: dict[str, str]  # name -> digest

    @classmethod
    def read(cls, path: str | Path) -> Quarantine:
        """Read a quarantine list; raise UserError if it is not one."""
        with os_errors_as(f"the quarantine list '{path}' cannot be read"):
            text = read_file(user_path(path)).decode("utf-8-sig", "surrogateescape")
        try:
            rows = list(read_csv_rows(text))
        except csv.Error as error:
            raise UserError(f"the quarantine list '{path}' is not a valid CSV table: {error}") from None
        titles = [title.strip().lower() for title in rows[0]] if rows else []
        if not {"name", "digest"} <= set(titles):
            raise UserError(f"the quarantine list '{path}' must have the columns 'name' and 'digest' in its first row")
        name, digest = titles.index("name"), titles.index("digest")
        digests: dict[str, str] = {}
        for number, row in enumerate(rows[1:], 2):
            if len(row) <= max(name, digest) or not re.fullmatch(r"([0-9a-fA-F]{32})?", row[digest].strip()):
                raise UserError(
                    f"the quarantine list '{path}' needs a name and a digest of 32 hexadecimal digits in row {number}"
                )
            digests[unescape_cell(row[name])] = row[digest].strip().lower()
        return cls(str(path), digests)

    def exclude(
        self, entries: Sequence[Entry], digests: np.ndarray, rows: Sequence[int], notes: list[str]
    ) -> list[int]:
        """Return the `rows` that are not in the list, and note what was excluded."""
        if not self.digests:
            return list(rows)
        listed = {row for row, entry in enumerate(entries) if entry.name in self.digests}
        matches = {row for row in listed if self.digests[entries[row].name] in ("", digests[row].tobytes().hex())}
        kept = [row for row in rows if row not in matches]
        if not kept:
            raise UserError(f"'{self.path}' excludes every usable image; remove rows from it")
        if not listed:
            notes.append(f"'{self.path}' lists no image of this data; was it made for other data?")
        if len(kept) < len(rows):
            notes.append(f"Skipped {counted(len(rows) - len(kept), 'image')} listed in '{self.path}'.")
        changed = [entries[row].name for row in sorted(set(rows) & (listed - matches))]
        if changed:
            which = f"{counted(len(changed), 'image')} listed in '{self.path}'"
            notes.append(f"Used {which}, because the content has changed: {quoted(changed)}.")
        return kept
