"""Class folders: the split and class of an image are the names of its folders."""

from __future__ import annotations

import os

from vitrail.data.files import Listing, ZipFiles
from vitrail.data.formats import SUPPORTED_FORMATS, by_extension
from vitrail.data.sources.data_source import SPLIT_NAMES, UNSPLIT, DataSource, counted, quoted
from vitrail.data.sources.root import Root, note_links
from vitrail.errors import UserError

NO_LABEL: tuple[str, ...] = ("image",)  # the label of every image in unlabelled data
# If one class folder has at least this fraction of the images, its subfolders must be the classes.
DOMINANT_FRACTION = 0.9


def read_folders(root: Root, notes: list[str]) -> DataSource:
    """Read <class>/... or {train,val,test}/<class>/... from a folder or a .zip archive."""
    root = enter_top_folder(root, notes)
    return read_class_folders(root, split_folders(root), notes)


def read_unlabelled(root: Root, notes: list[str]) -> DataSource:
    """Read all images in a folder or a .zip archive, at any depth, with one label for all."""
    listing = root.listing
    check_formats(listing, root.path)
    if not listing.images:
        raise UserError(f"'{root.path}' has no images")
    split_of = split_folders(root)
    note_ignored(listing, notes)
    note_links(listing, notes)
    splits = [split_of.get(entry.name.split("/")[0], "train") if split_of else UNSPLIT for entry in listing.images]
    labels: list[tuple[str, ...]] = [NO_LABEL] * len(listing.images)
    return DataSource(root.files, listing.images, splits, labels, noun="image", unreadable=listing.unreadable)


def enter_top_folder(root: Root, notes: list[str]) -> Root:
    """Descend into the single top folder of an archive.

    The class folders of a zipped `photos/` are one level down, and the command line cannot name a path in an archive.
    """
    while isinstance(root.files, ZipFiles):
        tops = {entry.name.split("/")[0] for entry in root.listing.images}
        shallow = any(entry.name.count("/") < 2 for entry in root.listing.images)
        if len(tops) != 1 or shallow or min(tops).lower() in SPLIT_NAMES:
            break
        notes.append(f"Read the class folders inside '{min(tops)}'.")
        root = Root(root.files.under(min(tops)), root.path)
    return root


def split_folders(root: Root) -> dict[str, str]:
    """Return folder -> split; empty for data without splits.

    A folder "train" among folders that are no splits is a class of trains.
    """
    tops = sorted({entry.name.split("/")[0] for entry in root.listing.images if "/" in entry.name})
    named = {top: SPLIT_NAMES[top.lower()] for top in tops if top.lower() in SPLIT_NAMES}
    if len(named) < min(2, len(tops)):
        return {}
    for split in named.values():
        same = [top for top in named if named[top] == split]
        if len(same) > 1:
            raise UserError(f"'{root.path}' has the folders {quoted(same)}, which are the same split; keep one of them")
    return named


def read_class_folders(root: Root, split_of: dict[str, str], notes: list[str]) -> DataSource:
    """Return the images in class folders with their splits; other files are ignored and noted.

    `split_of` maps the top folders to splits; if it is empty, the top folders are the classes.
    """
    listing, path = root.listing, root.path
    check_formats(listing, path)
    depth = 2 if split_of else 1
    images = DataSource(root.files, [], [], [], noun="class folder", unreadable=listing.unreadable)
    label_of: dict[str, tuple[str, ...]] = {}  # one tuple for all images of a class
    loose: list[str] = []
    outside_splits: list[str] = []
    for entry in listing.images:
        folders = entry.name.split("/")[:-1]
        if split_of and folders and folders[0] not in split_of:
            outside_splits.append(entry.name)
        elif len(folders) < depth:
            loose.append(entry.name)
        else:
            name = folders[depth - 1]
            images.entries.append(entry)
            images.splits.append(split_of[folders[0]] if split_of else UNSPLIT)
            images.labels.append(label_of.setdefault(name, (name,)))
    advice = "put the images of each class in a folder named after the class"
    if not images.entries:
        raise UserError(f"'{path}' has {'images but no class folders' if loose else 'no images'}; {advice}")
    if not split_of:
        if len(loose) > len(images.entries):
            raise UserError(
                f"'{path}' has {counted(len(loose), 'image')} outside class folders ({quoted(loose)}) and only "
                f"{len(images.entries):,} in class folders; {advice}"
            )
        _check_depth(images, path, notes)
        _note_same_subfolders(images, notes)
    empty = _empty_folders(listing, images, split_of, depth)
    for names, noun, where in (
        (loose, "image", "outside class folders"),
        (outside_splits, "image", f"outside the folders {quoted(split_of)}"),
        (empty, "class folder", "without images"),
    ):
        if names:
            notes.append(f"Ignored {counted(len(names), noun)} {where}: {quoted(names)}.")
    note_ignored(listing, notes)
    note_links(listing, notes)
    return images


def check_formats(listing: Listing, path: str) -> None:
    """Raise UserError if there are more files of unsupported formats than images.

    Text files do not count, nor do files named after an image next to them.
    """
    names = {entry.name for entry in listing.images}
    names |= {name.rpartition(".")[0] for name in names}
    unknown = [name for name in listing.unknown if name not in names and name.rpartition(".")[0] not in names]
    if len(unknown) > len(listing.images):
        raise UserError(
            f"'{path}' has {counted(len(unknown), 'file')} of unsupported formats ({by_extension(unknown)}) and only "
            f"{counted(len(listing.images), 'image')}; convert these files or move them elsewhere. vitrail reads "
            f"{SUPPORTED_FORMATS}"
        )


def note_ignored(listing: Listing, notes: list[str]) -> None:
    """Note what the listing has besides images."""
    for number, noun, what in (
        (listing.hidden, "hidden item", ""),
        (len(listing.others), "non-image file", f": {by_extension(listing.others)}"),
        (listing.relinked, "link", " to folders already read"),
        (len(listing.outputs), "folder", f" written by vitrail: {quoted(listing.outputs)}"),
    ):
        if number:
            notes.append(f"Ignored {counted(number, noun)}{what}.")


def _check_depth(images: DataSource, path: str, notes: list[str]) -> None:
    """Warn or raise if the classes seem to be deeper in the tree.

    The sign: most images are in one class folder, in more subfolders than there are class folders, all of them deeper
    than the folders of the other classes. Then this class folder is likely the data set, next to a few stray images.
    """
    folders: dict[str, list[str]] = {}  # class folder -> the folder of each of its images
    for entry in images.entries:
        top, _, _ = entry.name.partition("/")
        folders.setdefault(top, []).append(entry.name.rpartition("/")[0])
    largest, image_folders = max(folders.items(), key=lambda item: len(item[1]))
    fraction, subfolders = len(image_folders) / len(images.entries), set(image_folders)
    deepest = max((name.count("/") for top in folders if top != largest for name in folders[top]), default=-1)
    if (
        len(folders) < 2
        or fraction <= 0.5
        or len(subfolders) <= len(folders)
        or min(name.count("/") for name in subfolders) <= deepest
    ):
        return
    inner = os.path.commonpath(subfolders).replace(os.sep, "/")
    reason = f"'{largest}' has {fraction:.0%} of the images, in {len(subfolders):,} folders inside '{inner}'"
    if fraction >= DOMINANT_FRACTION:
        others = quoted([name for name in folders if name != largest])
        raise UserError(
            f"{reason}; the other class folders of '{path}' are {others}. If the classes are inside '{inner}', use "
            f"'{path}/{inner}' as the data; otherwise list the images and their labels in a .csv table"
        )
    notes.append(f"{reason}. If those are the classes, use '{path}/{inner}' as the data.")


def _note_same_subfolders(images: DataSource, notes: list[str]) -> None:
    """Note class folders that all have the same subfolders: they are likely splits with unusual names."""
    subfolders: dict[str, set[str]] = {}
    for entry in images.entries:
        top, *rest = entry.name.split("/")
        subfolders.setdefault(top, set()).add(rest[0] if len(rest) > 1 else "")
    distinct = {frozenset(names) for names in subfolders.values()}
    shared = min(distinct, key=len)
    if len(subfolders) > 1 and len(distinct) == 1 and len(shared) > 1 and "" not in shared:
        notes.append(
            f"Every class folder has the same subfolders, {quoted(sorted(shared))}. If those are the classes, rename "
            "the outer folders to train, val or test."
        )


def _empty_folders(listing: Listing, images: DataSource, split_of: dict[str, str], depth: int) -> list[str]:
    filled = {"/".join(entry.name.split("/")[:depth]) for entry in images.entries}
    class_folders = [name for name in listing.folders if name.count("/") == depth - 1]
    return [name for name in class_folders if name not in filled and (not split_of or name.split("/")[0] in split_of)]
