"""The page of `vitrail check`: one HTML file in the style of the classification report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.decode import BadImage, decode
from vitrail.doctor.findings import Case, Finding, Findings
from vitrail.report.page import page_environment, write_text_file

MAX_IMAGES = 60  # per finding
MAX_ROWS = 200  # per finding
MAX_CASE_IMAGES = 6  # per case
IMAGE_SIZE = 160  # pixels of the longer side
_KINDS_WITHOUT_IMAGES = ("classes", "corrupt", "format", "missing", "missing-class", "few-images", "imbalance")


@dataclass(frozen=True, eq=False)
class ShownCase:
    """A case with the images that are shown: (name, split and labels, pixels)."""

    case: Case
    images: list[tuple[str, str, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Section:
    """One finding, shown either as images or as table rows."""

    finding: Finding
    shown: list[ShownCase]
    rows: list[Case]

    @property
    def more(self) -> int:
        """The number of cases that are not shown."""
        return len(self.finding.cases) - len(self.shown or self.rows)


def write_check_page(path: Path, findings: Findings, name: str, commands: Sequence[str]) -> None:
    """Write the page. An existing file is replaced only when the new one is complete."""
    write_text_file(path, render_check_page(findings, name, commands), "the report")


def render_check_page(findings: Findings, name: str, commands: Sequence[str]) -> str:
    environment = page_environment()
    totals = {name: sum(counts.values()) for name, counts in findings.balance.items()}
    return environment.get_template("check.html").render(
        findings=findings,
        name=name,
        sections=[_section(findings, finding) for finding in findings.findings],
        severities=[finding.severity for finding in findings.findings],
        classes=sorted(findings.balance.items(), key=lambda item: (-totals[item[0]], item[0])),
        largest=max(totals.values(), default=0) or 1,
        commands=commands,
    )


def _section(findings: Findings, finding: Finding) -> Section:
    if finding.kind in _KINDS_WITHOUT_IMAGES:
        return Section(finding, [], finding.cases[:MAX_ROWS])
    shown: list[ShownCase] = []
    remaining = MAX_IMAGES
    for case in finding.cases:
        names = case.names[: min(MAX_CASE_IMAGES, remaining)]
        if len(names) < min(len(case.names), 2):
            break
        remaining -= len(names)
        images = [(name, _split_and_labels(findings, name), _thumbnail(findings, name)) for name in names]
        shown.append(ShownCase(case, images))
    return Section(finding, shown, [])


def _split_and_labels(findings: Findings, name: str) -> str:
    location = findings.where(name)
    split = "" if location["split"] == "all" else f"{location['split']} · "
    return split + ", ".join(location["labels"])


def _thumbnail(findings: Findings, name: str) -> np.ndarray:
    """Return a small version of an image, or a grey one if it can no longer be read."""
    try:
        pixels = decode(findings.source.files.read(name))
    except (OSError, BadImage):
        return np.full((8, 8, 3), 128, np.uint8)
    height, width = pixels.shape[:2]
    if max(height, width) <= IMAGE_SIZE:
        return pixels
    scale = IMAGE_SIZE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))
