"""What a source holds, before any image is opened: the split, classes, group and weight of each."""

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
class ImageList:
    """Row by row: an image, its split, and the names of its classes; then what holds for all of them.

    Groups (a patient, a burst of shots) stay on one side of a split; "" is no group.
    """

    files: Files
    entries: list[Entry]
    splits: list[str]  # train, val, test; or UNSPLIT in every row
    labels: list[tuple[str, ...]]  # one class, or with `several` any number
    groups: list[str] | None = None
    weights: list[float] | None = None
    classes: tuple[str, ...] | None = None  # in the order that the data itself states
    multilabel: bool = False
    noun: str = "class"  # what the user calls a class here
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # (name, reason)
    scan: ScanResult | None = None  # what an earlier look at these very bytes found

    @property
    def given_split(self) -> bool:
        return any(split != UNSPLIT for split in self.splits)

    def keep(self, rows: Iterable[int]) -> ImageList:
        rows = list(rows)
        columns = {name: getattr(self, name) for name in ("entries", "splits", "labels", "groups", "weights")}
        kept: dict[str, Any] = {name: [col[row] for row in rows] for name, col in columns.items() if col is not None}
        return replace(self, **kept, scan=None)


def class_list(found: ImageList, known: Sequence[str] | None, path: str | Path, fewest: int = 2) -> tuple[str, ...]:
    """The classes in the order of their labels: that of `known`, else the one the data states, else that of the code
    points of the training classes.

    A class that is not among them is an error: it would shift labels or count against the model unseen.
    """
    if known is not None:
        names = tuple(known)
    elif found.classes is not None:
        names = found.classes
    else:
        fixing = "train" if "train" in found.splits else None
        sets = {labels for labels, split in zip(found.labels, found.splits, strict=True) if fixing in (None, split)}
        names = tuple(sorted({name for labels in sets for name in labels}))
    if len(names) < fewest:
        raise UserError(_one_class(found, names, path))
    for name in names:
        if not is_printable(name) or not name:
            what = f"the name of the {found.noun} {name!a}"
            raise UserError(f"{what} in '{path}' is not plain text: rename the {found.noun.split()[-1]}")
    allowed = frozenset(names)
    for labels, split in dict.fromkeys(zip(found.labels, found.splits, strict=True)):
        for name in labels:
            if name not in allowed:
                where = f"'{path}'" if split == UNSPLIT else f"the {split} split of '{path}'"
                those = "training classes" if known is None else "known classes"
                raise UserError(
                    f"{found.noun} '{name}' in {where} is not one of the {those}{did_you_mean(name, names)}"
                )
    return names


def _one_class(found: ImageList, names: Sequence[str], path: str | Path) -> str:
    if not names:
        return f"'{path}' names no classes"
    name, hint = names[0], ""
    if found.noun == "class folder" and not found.given_split:
        inner = {entry.name.split("/")[1] for entry in found.entries if entry.name.count("/") > 1}
        hint = f"; did you mean '{path}/{name}'?" if len(inner) > 1 else ""
    return f"'{path}' has only one class, '{name}', and a classifier needs two {plural(found.noun)} or more{hint}"


def plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """1 image, 2,000 images."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def quoted(names: Iterable[str], limit: int = 4) -> str:
    """'a', 'b', 'c', 'd' and 7 more."""
    shown = [f"'{shorten(name)}'" for name in names]
    rest = f" and {len(shown) - limit:,} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + rest


def shorten(text: str, most: int = 300) -> str:
    """A name or a cell of a table as a message shows it."""
    return text if len(text) <= most else f"{text[:most]}..."
