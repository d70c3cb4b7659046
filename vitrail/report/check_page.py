"""The page of `vitrail check`: one self-contained HTML file in the look of the classification report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.atomic import atomic_write
from vitrail.data.decode import BadImage, decode
from vitrail.doctor.findings import Case, Finding, Findings
from vitrail.report.page import page_environment
from vitrail.terminal import printable_text

MOST_PICTURES = 60  # of a finding
MOST_ROWS = 200
OF_A_GROUP = 6  # pictures of one case
SIDE = 160  # pixels
_NO_PICTURES = ("classes", "corrupt", "format", "missing", "missing-class", "few-images", "imbalance")


@dataclass(frozen=True, eq=False)
class Shown:
    """A case with the pictures there is room for: (name, split and labels, pixels)."""

    case: Case
    pictures: list[tuple[str, str, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Section:
    finding: Finding
    shown: list[Shown]  # of findings that pictures explain
    rows: list[Case]  # of those that words explain

    @property
    def more(self) -> int:
        return len(self.finding.cases) - len(self.shown or self.rows)


def write_check_page(path: Path, found: Findings, name: str, commands: Sequence[str]) -> None:
    text = printable_text(render_check_page(found, name, commands).replace("\0", "\ufffd"))  # which a page cannot hold
    with atomic_write(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors="replace"))


def render_check_page(found: Findings, name: str, commands: Sequence[str]) -> str:
    environment = page_environment()
    totals = {name: sum(counts.values()) for name, counts in found.balance.items()}
    return environment.get_template("check.html").render(
        found=found,
        name=name,
        sections=[_section(found, finding) for finding in found.findings],
        severities=[finding.severity for finding in found.findings],
        classes=sorted(found.balance.items(), key=lambda one: (-totals[one[0]], one[0])),
        largest=max(totals.values(), default=0) or 1,
        commands=commands,
    )


def _section(found: Findings, finding: Finding) -> Section:
    if finding.kind in _NO_PICTURES:
        return Section(finding, [], finding.cases[:MOST_ROWS])
    shown: list[Shown] = []
    room = MOST_PICTURES
    for case in finding.cases:
        names = case.names[: min(OF_A_GROUP, room)]
        if len(names) < min(len(case.names), 2):
            break
        room -= len(names)
        shown.append(Shown(case, [(name, _place(found, name), _picture(found, name)) for name in names]))
    return Section(finding, shown, [])


def _place(found: Findings, name: str) -> str:
    where = found.where(name)
    split = "" if where["split"] == "all" else f"{where['split']} · "
    return split + ", ".join(where["labels"])


def _picture(found: Findings, name: str) -> np.ndarray:
    """Small pixels of an image; grey where it cannot be had any more."""
    try:
        pixels = decode(found.source.files.read(name))
    except (OSError, BadImage):
        return np.full((8, 8, 3), 128, np.uint8)
    height, width = pixels.shape[:2]
    if max(height, width) <= SIDE:
        return pixels
    scale = SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))
