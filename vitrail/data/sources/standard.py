"""Standard data sets in the layouts they are published in, seen from what lies there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitrail.data.files import FolderFiles, ZipFiles
from vitrail.data.sources.catalogue import Catalogue, count, some
from vitrail.data.sources.cifar import is_tar, read_cifar, read_cifar_tar
from vitrail.data.sources.imagenet import read_imagenet, read_tiny
from vitrail.data.sources.layout import place as class_folders
from vitrail.data.sources.listed import read_textures, read_thousand
from vitrail.data.sources.oxford import read_flowers, read_pets
from vitrail.data.sources.sidefiles import Root
from vitrail.errors import UserError

CALTECH = "101_ObjectCategories"
BACKGROUND = "BACKGROUND_Google"
# What archives of these data sets unpack to: one step further in, when a path names the folder around them.
FOLDERS = frozenset(
    {
        "cifar-10-batches-bin",
        "cifar-10-batches-py",
        "cifar-100-binary",
        "cifar-100-python",
        "102flowers",
        "flowers-102",
        "oxford-iiit-pet",
        "caltech-101",
        "caltech101",
        CALTECH,
        "tiny-imagenet-200",
        "dtd",
    }
)
DEEPEST = 2  # caltech-101/101_ObjectCategories


def read_caltech(root: Root, notes: list[str]) -> Catalogue | None:
    """101_ObjectCategories/<class>/image_0001.jpg: class folders, and one of images of no class."""
    folders = root.folders()
    if root.name != CALTECH and not {BACKGROUND, "Faces_easy"} <= set(folders):
        return None
    if len(folders) < 2:
        return None
    notes.append("Read as Caltech-101 in its original layout.")
    images = [entry for entry in root.listing.images if not entry.name.startswith(f"{BACKGROUND}/")]
    left = len(root.listing.images) - len(images)
    if left:
        notes.append(f"Left out {count(left, 'image')} of '{BACKGROUND}', which is no class.")
    inside = [folder for folder in root.listing.folders if folder != BACKGROUND]
    return class_folders(root.files, replace(root.listing, images=images, folders=inside), {}, root.path, notes)


Reader = Callable[[Root, list[str]], Catalogue | None]
READERS: tuple[Reader, ...] = (
    read_cifar,
    read_flowers,
    read_pets,
    read_thousand,
    read_textures,
    read_caltech,
    read_tiny,
    read_imagenet,
)


def read_standard(place: Path, notes: list[str], follow: bool = True) -> Catalogue | None:
    """The data set at `place` with the split and the order of classes it is known by, or nothing."""
    if place.is_dir():
        return _read(Root(FolderFiles(str(place.absolute()), follow), str(place)), notes, DEEPEST)
    if place.suffix.lower() == ".zip":
        return _read(Root(ZipFiles(str(place.absolute())), str(place)), notes, DEEPEST)
    return read_cifar_tar(place, notes) if is_tar(place) else None


def _read(root: Root, notes: list[str], steps: int) -> Catalogue | None:
    for reader in READERS:
        found = reader(root, notes)
        if found is not None:
            return found
    folders = root.folders() if steps else []
    inner = folders if len(folders) == 1 else [folder for folder in folders if folder in FOLDERS]
    sets = {folder: each for folder in inner if (each := _read(root.under(folder), notes, steps - 1)) is not None}
    if len(sets) > 1:
        raise UserError(f"'{root.path}' holds several data sets, {some(sets)}; give the folder of one of them")
    return next(iter(sets.values()), None)
