"""What folders mean: the split and the class of every image, and the one order of the classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.errors import UserError, did_you_mean
from vitrail.images.files import Entry, Files, Listing, ZipFiles

SPLIT_FOLDERS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
UNSPLIT = "all"


@dataclass(frozen=True)
class Placed:
    """Images in the order of their names, each beside the split and the class that its folders give it."""

    entries: list[Entry]
    splits: list[str]
    classes: list[str]

    def keep(self, rows: Iterable[int]) -> Placed:
        rows = list(rows)
        return Placed([self.entries[r] for r in rows], [self.splits[r] for r in rows], [self.classes[r] for r in rows])


def step_inside(files: Files, listing: Listing, notes: list[str]) -> tuple[Files, Listing]:
    """An archive of `photos/` holds the class folders one level down, where no path on the command line can point."""
    while isinstance(files, ZipFiles):
        tops = {entry.name.split("/")[0] for entry in listing.images}
        shallow = any(entry.name.count("/") < 2 for entry in listing.images)
        if len(tops) != 1 or shallow or min(tops).lower() in SPLIT_FOLDERS:
            break
        notes.append(f"The class folders are those inside '{min(tops)}'.")
        files = files.under(min(tops))
        listing = files.list()
    return files, listing


def split_folders(listing: Listing, path: str | Path) -> dict[str, str]:
    """Folder -> split, or nothing for unsplit data. One 'train' among other folders is a class of trains."""
    tops = sorted({entry.name.split("/")[0] for entry in listing.images if "/" in entry.name})
    named = {top: SPLIT_FOLDERS[top.lower()] for top in tops if top.lower() in SPLIT_FOLDERS}
    if len(named) < min(2, len(tops)):
        return {}
    for split in named.values():
        same = [top for top in named if named[top] == split]
        if len(same) > 1:
            raise UserError(f"'{path}' has the folders {some(same)}, which mean the same split; keep one of them")
    return named


def place(listing: Listing, given: dict[str, str], path: str | Path, notes: list[str]) -> Placed:
    """Split and class of every image; what lies elsewhere is ignored and noted."""
    depth = 2 if given else 1
    placed = Placed([], [], [])
    loose: list[str] = []
    foreign: list[str] = []
    for entry in listing.images:
        folders = entry.name.split("/")[:-1]
        if given and folders and folders[0] not in given:
            foreign.append(entry.name)
        elif len(folders) < depth:
            loose.append(entry.name)
        else:
            placed.entries.append(entry)
            placed.splits.append(given[folders[0]] if given else UNSPLIT)
            placed.classes.append(folders[depth - 1])
    if not placed.entries:
        found = "has images but no class folders" if loose else "holds no images"
        raise UserError(f"'{path}' {found}; put the images of each class in a folder named after the class")
    if not given:
        _note_same_inside(placed, notes)
    empty = _empty_folders(listing, placed, given, depth)
    for names, noun, where in (
        (loose, "image", "beside the class folders"),
        (foreign, "image", f"outside the folders {some(given)}"),
        (empty, "class folder", "without images"),
    ):
        if names:
            notes.append(f"Ignored {count(len(names), noun)} {where}: {some(names)}.")
    for number, noun, what in (
        (listing.hidden, "hidden item", ""),
        (listing.others, "file", " without the name of an image"),
        (listing.relinked, "link", " to folders already read"),
    ):
        if number:
            notes.append(f"Ignored {count(number, noun)}{what}.")
    return placed


def _note_same_inside(placed: Placed, notes: list[str]) -> None:
    """Class folders that all hold the same folders are likely splits under names of their own."""
    inside: dict[str, set[str]] = {}
    for entry in placed.entries:
        top, *rest = entry.name.split("/")
        inside.setdefault(top, set()).add(rest[0] if len(rest) > 1 else "")
    kinds = {frozenset(names) for names in inside.values()}
    shared = min(kinds, key=len)
    if len(inside) > 1 and len(kinds) == 1 and len(shared) > 1 and "" not in shared:
        notes.append(
            f"Every class folder holds the same folders, {some(sorted(shared))}: if those are the classes, "
            "rename the outer folders to train, val or test."
        )


def _empty_folders(listing: Listing, placed: Placed, given: dict[str, str], depth: int) -> list[str]:
    filled = {"/".join(entry.name.split("/")[:depth]) for entry in placed.entries}
    class_folders = [name for name in listing.folders if name.count("/") == depth - 1]
    return [name for name in class_folders if name not in filled and (not given or name.split("/")[0] in given)]


def class_list(placed: Placed, known: Sequence[str] | None, path: str | Path) -> tuple[str, ...]:
    """The classes in the order of their labels: that of `known`, else of the code points of the training classes.

    A folder that is not among them is an error: it would shift labels or count against the model unseen.
    """
    if known is None:
        fixing = "train" if "train" in placed.splits else None
        found = {c for c, split in zip(placed.classes, placed.splits, strict=True) if fixing in (None, split)}
        names = tuple(sorted(found))
        if len(names) < 2:
            raise UserError(_one_class(placed, names[0], path))
    else:
        names = tuple(known)
    for name in names:
        if not name.isprintable():
            shown = ascii(name)
            raise UserError(f"the name of the class folder {shown} in '{path}' is not plain text: rename the folder")
    allowed = frozenset(names)
    for name, split in dict.fromkeys(zip(placed.classes, placed.splits, strict=True)):
        if name not in allowed:
            where = f"'{path}'" if split == UNSPLIT else f"the {split} split of '{path}'"
            those = "training classes" if known is None else "known classes"
            raise UserError(f"class folder '{name}' in {where} is not one of the {those}{did_you_mean(name, names)}")
    return names


def _one_class(placed: Placed, name: str, path: str | Path) -> str:
    depth = 1 if placed.splits[0] == UNSPLIT else 2
    inner = {entry.name.split("/")[depth] for entry in placed.entries if entry.name.count("/") > depth}
    hint = f"; did you mean '{path}/{name}'?" if len(inner) > 1 and depth == 1 else ""
    return f"'{path}' has only one class, '{name}', and a classifier needs two class folders or more{hint}"


def count(number: int, noun: str) -> str:
    """1 image, 2,000 images."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def some(names: Iterable[str], limit: int = 4) -> str:
    """'a', 'b', 'c', 'd' and 7 more."""
    quoted = [f"'{name}'" for name in names]
    rest = f" and {len(quoted) - limit:,} more" if len(quoted) > limit else ""
    return ", ".join(quoted[:limit]) + rest
