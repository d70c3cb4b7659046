"""What `vitrail check` has to say about a data set, before it becomes text, a page or JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.data.quarantine import QuarantineRow
from vitrail.data.sources.image_list import ImageList

Severity = Literal["severe", "warning", "note"]
# Most severe first: what makes a measured accuracy wrong, what makes training learn wrong things, what costs images,
# then what is worth a look.
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
    """One image, or several that belong together, and what is to be said of them."""

    names: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    kind: str  # a key of SEVERITY
    title: str  # a sentence with the count
    advice: str  # what it means and what to do
    cases: list[Case] = field(default_factory=list)

    @property
    def severity(self) -> Severity:
        return SEVERITY[self.kind]


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything a check found. `balance` counts the usable images: class -> split -> images."""

    root: str
    source: ImageList
    usable: int
    balance: dict[str, dict[str, int]]
    findings: list[Finding]  # most severe first
    quarantine: list[QuarantineRow]
    notes: list[str]  # of the source: what was ignored
    rows: dict[str, int] = field(default_factory=dict)  # name -> row of the source

    @property
    def severe(self) -> bool:
        """Whether a measurement or a training on this data would go wrong."""
        return any(finding.severity == "severe" for finding in self.findings)

    @property
    def splits(self) -> dict[str, int]:
        """Images of each split, usable or not."""
        counts = Counter(self.source.splits)
        order = [name for name in ("train", "val", "test") if name in counts]
        return {name: counts[name] for name in [*order, *(name for name in counts if name not in order)]}

    def where(self, name: str) -> dict[str, Any]:
        """An image as JSON: its name, and where it stands."""
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
