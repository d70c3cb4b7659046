"""The results of `vitrail check` as plain data; text, the HTML page and JSON are made from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.data.quarantine import QuarantineRow
from vitrail.data.sources.data_source import DataSource

Severity = Literal["severe", "warning", "note"]
# Most severe first: wrong accuracy, wrong training labels, lost images, then what only needs a look.
SEVERITY: dict[str, Severity] = {
    "classes": "severe",
    "leak": "severe",
    "near-leak": "severe",
    "torn-group": "severe",
    "conflict": "severe",
    "corrupt": "severe",
    "format": "severe",
    "missing": "severe",
    "near-conflict": "warning",
    "missing-class": "warning",
    "few-images": "warning",
    "imbalance": "warning",
    "misnamed": "warning",
    "shape": "warning",
    "duplicate": "warning",
    "near-duplicate": "note",
    "rotated": "note",
    "grey": "note",
    "cmyk": "note",
    "sixteen-bit": "note",
    "wide": "warning",
    "animated": "note",
    "alpha": "note",
    "palette": "note",
}


@dataclass(frozen=True)
class Case:
    """One image, or several that belong together, with a detail in words."""

    names: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """One kind of problem and all images that have it."""

    kind: str  # a key of SEVERITY
    title: str  # one sentence with the count
    advice: str  # why it matters and what to do
    cases: list[Case] = field(default_factory=list)

    @property
    def severity(self) -> Severity:
        return SEVERITY[self.kind]


@dataclass(frozen=True, eq=False)
class Findings:
    """The result of a check. `balance` counts the usable images: class -> split -> images."""

    root: str
    source: DataSource
    usable: int
    balance: dict[str, dict[str, int]]
    findings: list[Finding]  # most severe first
    quarantine: list[QuarantineRow]
    notes: list[str]  # what was ignored while reading the source
    rows: dict[str, int] = field(default_factory=dict)  # image name -> row of the source

    @property
    def severe(self) -> bool:
        """Whether training or evaluating on this data would give wrong results."""
        return any(finding.severity == "severe" for finding in self.findings)

    @property
    def splits(self) -> dict[str, int]:
        """Number of images in each split, usable or not."""
        counts = Counter(self.source.splits)
        order = [name for name in ("train", "val", "test") if name in counts]
        return {name: counts[name] for name in [*order, *(name for name in counts if name not in order)]}

    def where(self, name: str) -> dict[str, Any]:
        """One image for JSON: its name, split and labels."""
        row = self.rows.get(name)
        if row is None:
            return {"name": name}
        return {"name": name, "split": self.source.splits[row], "labels": list(self.source.labels[row])}

    def to_dict(self) -> dict[str, Any]:
        return {
            "data": self.root,
            "images": len(self.source.entries),
            "usable": self.usable,
            "severe": self.severe,
            "splits": self.splits,
            "classes": self.balance,
            "findings": [
                {
                    "kind": finding.kind,
                    "severity": finding.severity,
                    "title": finding.title,
                    "advice": finding.advice,
                    "cases": [
                        {"images": [self.where(name) for name in case.names], "detail": case.detail}
                        for case in finding.cases
                    ],
                }
                for finding in self.findings
            ],
            "quarantine": [row._asdict() for row in self.quarantine],
            "notes": self.notes,
        }
