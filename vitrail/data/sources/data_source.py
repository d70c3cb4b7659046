"""The images of a data source with their splits, labels, groups and weights, before any image is opened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.data.files import Entry, Files
from vitrail.errors import UserError, did_you_mean
from vitrail.terminal import is_printable

if TYPE_CHECKING:
    from vitrail.data.scan import ScanResult

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
UNSPLIT = "all"


@dataclass(frozen=True)
class DataSource:
    """One row per image: its file, split and class names; then attributes of the whole data.

    Images of one group (a patient, a burst of shots) stay in one split; "" means no group.
    """

    files: Files
    entries: list[Entry]
    splits: list[str]  # train, val, test; or UNSPLIT in every row
    labels: list[tuple[str, ...]]  # one class, or any number of them if `multilabel`
    groups: list[str] | None = None
    weights: list[float] | None = None
    classes: tuple[str, ...] | None = None  # in the order that the data itself defines
    multilabel: bool = False
    noun: str = "class"  # what messages call a class: "class", "class folder"
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (name, reason)
    scan: ScanResult | None = None  # stored result of an earlier scan of the same bytes

    @property
    def given_split(self) -> bool:
        """Whether the data comes with its own splits."""
        return any(split != UNSPLIT for split in self.splits)

    def keep(self, rows: Iterable[int]) -> DataSource:
        """Return the data with these rows only, in this order."""
        rows = list(rows)
        columns = {name: getattr(self, name) for name in ("entries", "splits", "labels", "groups", "weights")}
        kept: dict[str, Any] = {name: [col[row] for row in rows] for name, col in columns.items() if col is not None}
        return replace(self, **kept, scan=None)


def class_list(
    images: DataSource, known: Sequence[str] | None, path: str | Path, min_classes: int = 2
) -> tuple[str, ...]:
    """Return the class names in label order.

    The order is that of `known`, else the one the data defines, else the sorted names (by code point) of the training
    classes. A label outside these classes is an error: it would shift the other labels, or count as a wrong prediction.
    """
    if known is not None:
        names = tuple(known)
    elif images.classes is not None:
        names = images.classes
    else:
        split_used = "train" if "train" in images.splits else None
        sets = {
            labels for labels, split in zip(images.labels, images.splits, strict=True) if split_used in (None, split)
        }
        names = tuple(sorted({name for labels in sets for name in labels}))
    if len(names) < min_classes:
        raise UserError(_too_few_classes(images, names, path))
    for name in names:
        if not is_printable(name) or not name:
            raise UserError(
                f"the name of the {images.noun} {name!a} in '{path}' is empty or has unprintable characters; rename "
                f"the {images.noun.split()[-1]}"
            )
    allowed = frozenset(names)
    for labels, split in dict.fromkeys(zip(images.labels, images.splits, strict=True)):
        for name in labels:
            if name not in allowed:
                where = f"'{path}'" if split == UNSPLIT else f"the {split} split of '{path}'"
                expected = "training classes" if known is None else "known classes"
                raise UserError(
                    f"{images.noun} '{name}' in {where} is not one of the {expected}{did_you_mean(name, names)}"
                )
    return names


def _too_few_classes(images: DataSource, names: Sequence[str], path: str | Path) -> str:
    if not names:
        return f"'{path}' has no class names"
    name, hint = names[0], ""
    if images.noun == "class folder" and not images.given_split:
        inner = {entry.name.split("/")[1] for entry in images.entries if entry.name.count("/") > 1}
        hint = f"; did you mean '{path}/{name}'?" if len(inner) > 1 else ""
    return f"'{path}' has only one class, '{name}'; a classifier needs at least two {plural(images.noun)}{hint}"


def plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Return "1 image" or "2,000 images"."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def quoted(names: Iterable[str], limit: int = 4) -> str:
    """Return "'a', 'b', 'c', 'd' and 7 more"."""
    shown = [f"'{shorten(name)}'" for name in names]
    rest = f" and {len(shown) - limit:,} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + rest


def shorten(text: str, limit: int = 300) -> str:
    """Return the text, cut to `limit` characters for messages."""
    return text if len(text) <= limit else f"{text[:limit]}..."
