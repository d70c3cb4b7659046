"""Class folders: the split and the class that its folders give every image."""

from __future__ import annotations

import os

from vitrail.data.files import Listing, ZipFiles
from vitrail.data.formats import SUPPORTED_FORMATS, by_extension
from vitrail.data.sources.image_list import SPLIT_NAMES, UNSPLIT, ImageList, counted, quoted
from vitrail.data.sources.root import Root, note_links
from vitrail.errors import UserError

NO_LABEL: tuple[str, ...] = ("image",)  # of images without labels
NEARLY_ALL = 0.9  # share of the images in one class folder, from which on its own folders must be the classes


def read_folders(root: Root, notes: list[str]) -> ImageList:
    """<class>/... or {train,val,test}/<class>/..., in a folder or a .zip archive of one."""
    root = enter_top_folder(root, notes)
    return read_class_folders(root, split_folders(root), notes)


def read_unlabelled(root: Root, notes: list[str]) -> ImageList:
    """All images in a folder or a .zip archive, whatever folders they lie in, all with one label."""
    listing = root.listing
    check_formats(listing, root.path)
    if not listing.images:
        raise UserError(f"'{root.path}' holds no images")
    given = split_folders(root)
    note_ignored(listing, notes)
    note_links(listing, notes)
    splits = [given.get(entry.name.split("/")[0], "train") if given else UNSPLIT for entry in listing.images]
    labels: list[tuple[str, ...]] = [NO_LABEL] * len(listing.images)
    return ImageList(root.files, listing.images, splits, labels, noun="image", unreadable=listing.unreadable)


def enter_top_folder(root: Root, notes: list[str]) -> Root:
    """An archive of `photos/` holds the class folders one level down, where no path on the command line can point."""
    while isinstance(root.files, ZipFiles):
        tops = {entry.name.split("/")[0] for entry in root.listing.images}
        shallow = any(entry.name.count("/") < 2 for entry in root.listing.images)
        if len(tops) != 1 or shallow or min(tops).lower() in SPLIT_NAMES:
            break
        notes.append(f"The class folders are those inside '{min(tops)}'.")
        root = Root(root.files.under(min(tops)), root.path)
    return root


def split_folders(root: Root) -> dict[str, str]:
    """Folder -> split, or nothing for unsplit data. One 'train' among other folders is a class of trains."""
    tops = sorted({entry.name.split("/")[0] for entry in root.listing.images if "/" in entry.name})
    named = {top: SPLIT_NAMES[top.lower()] for top in tops if top.lower() in SPLIT_NAMES}
    if len(named) < min(2, len(tops)):
        return {}
    for split in named.values():
        same = [top for top in named if named[top] == split]
        if len(same) > 1:
            raise UserError(
                f"'{root.path}' has the folders {quoted(same)}, which mean the same split; keep one of them"
            )
    return named


def read_class_folders(root: Root, given: dict[str, str], notes: list[str]) -> ImageList:
    """Split and class of every image; what lies elsewhere is ignored and noted."""
    listing, path = root.listing, root.path
    check_formats(listing, path)
    depth = 2 if given else 1
    placed = ImageList(root.files, [], [], [], noun="class folder", unreadable=listing.unreadable)
    label_of: dict[str, tuple[str, ...]] = {}  # one tuple for all images of a class
    loose: list[str] = []
    foreign: list[str] = []
    for entry in listing.images:
        folders = entry.name.split("/")[:-1]
        if given and folders and folders[0] not in given:
            foreign.append(entry.name)
        elif len(folders) < depth:
            loose.append(entry.name)
        else:
            name = folders[depth - 1]
            placed.entries.append(entry)
            placed.splits.append(given[folders[0]] if given else UNSPLIT)
            placed.labels.append(label_of.setdefault(name, (name,)))
    if not placed.entries:
        found = "has images but no class folders" if loose else "holds no images"
        raise UserError(f"'{path}' {found}; put the images of each class in a folder named after the class")
    if not given:
        if len(loose) > len(placed.entries):
            raise UserError(
                f"'{path}' has {counted(len(loose), 'image')} beside the class folders ({quoted(loose)}), and only "
                f"{len(placed.entries):,} in them; put the images of each class in a folder named after the class"
            )
        _check_depth(placed, path, notes)
        _note_same_inside(placed, notes)
    empty = _empty_folders(listing, placed, given, depth)
    for names, noun, where in (
        (loose, "image", "beside the class folders"),
        (foreign, "image", f"outside the folders {quoted(given)}"),
        (empty, "class folder", "without images"),
    ):
        if names:
            notes.append(f"Ignored {counted(len(names), noun)} {where}: {quoted(names)}.")
    note_ignored(listing, notes)
    note_links(listing, notes)
    return placed


def check_formats(listing: Listing, path: str) -> None:
    """That most files are of a format that is read. Text does not count, nor what lies beside an image and is called
    like it."""
    names = {entry.name for entry in listing.images}
    names |= {name.rpartition(".")[0] for name in names}
    lost = [name for name in listing.unknown if name not in names and name.rpartition(".")[0] not in names]
    if len(lost) > len(listing.images):
        raise UserError(
            f"'{path}' has {counted(len(lost), 'file')} of formats that are not read ({by_extension(lost)}) and "
            f"{counted(len(listing.images), 'image')}; vitrail reads {SUPPORTED_FORMATS}: convert the files, or move "
            "them elsewhere"
        )


def note_ignored(listing: Listing, notes: list[str]) -> None:
    """What was found beside the images."""
    kinds = f": {by_extension(listing.others)}"
    for number, noun, what in (
        (listing.hidden, "hidden item", ""),
        (len(listing.others), "file", f" without an image{kinds}"),
        (listing.relinked, "link", " to folders already read"),
        (len(listing.outputs), "folder", f" that vitrail wrote: {quoted(listing.outputs)}"),
    ):
        if number:
            notes.append(f"Ignored {counted(number, noun)}{what}.")


def _check_depth(placed: ImageList, path: str, notes: list[str]) -> None:
    """A class folder whose images all lie in folders of its own, further down than those of the other classes, and in
    more of them than there are classes, is likely a data set beside stray images."""
    folders: dict[str, list[str]] = {}  # class -> the folder of each image
    for entry in placed.entries:
        top, _, _ = entry.name.partition("/")
        folders.setdefault(top, []).append(entry.name.rpartition("/")[0])
    top, inner = max(folders.items(), key=lambda item: len(item[1]))
    share, own = len(inner) / len(placed.entries), set(inner)
    deepest = max((name.count("/") for other in folders if other != top for name in folders[other]), default=-1)
    if len(folders) < 2 or share <= 0.5 or len(own) <= len(folders) or min(name.count("/") for name in own) <= deepest:
        return
    place = os.path.commonpath(own).replace(os.sep, "/")
    said = f"'{top}' has {share:.0%} of the images, in {len(own):,} folders inside '{place}'"
    if share >= NEARLY_ALL:
        raise UserError(
            f"{said}, and the other class folders of '{path}' are {quoted([name for name in folders if name != top])}: "
            f"give '{path}/{place}' if the classes are there, else list the images and their labels in a .csv table"
        )
    notes.append(f"{said}: if those are the classes, give '{path}/{place}'.")


def _note_same_inside(placed: ImageList, notes: list[str]) -> None:
    """Class folders that all hold the same folders are likely splits under names of their own."""
    inside: dict[str, set[str]] = {}
    for entry in placed.entries:
        top, *rest = entry.name.split("/")
        inside.setdefault(top, set()).add(rest[0] if len(rest) > 1 else "")
    kinds = {frozenset(names) for names in inside.values()}
    shared = min(kinds, key=len)
    if len(inside) > 1 and len(kinds) == 1 and len(shared) > 1 and "" not in shared:
        notes.append(
            f"Every class folder holds the same folders, {quoted(sorted(shared))}: if those are the classes, "
            "rename the outer folders to train, val or test."
        )


def _empty_folders(listing: Listing, placed: ImageList, given: dict[str, str], depth: int) -> list[str]:
    filled = {"/".join(entry.name.split("/")[:depth]) for entry in placed.entries}
    class_folders = [name for name in listing.folders if name.count("/") == depth - 1]
    return [name for name in class_folders if name not in filled and (not given or name.split("/")[0] in given)]
