"""Caltech-101 as it is published: class folders, and one of images of no class."""

from __future__ import annotations

from dataclasses import replace

from vitrail.data.sources.class_folders import read_class_folders
from vitrail.data.sources.image_list import ImageList, counted
from vitrail.data.sources.root import Root

CALTECH = "101_ObjectCategories"
BACKGROUND = "BACKGROUND_Google"


def read_caltech(root: Root, notes: list[str]) -> ImageList | None:
    """101_ObjectCategories/<class>/image_0001.jpg."""
    folders = root.folders()
    if root.name != CALTECH and not {BACKGROUND, "Faces_easy"} <= set(folders):
        return None
    if len(folders) < 2:
        return None
    notes.append("Read as Caltech-101 in its original layout.")
    listing = root.listing
    images = [entry for entry in listing.images if not entry.name.startswith(f"{BACKGROUND}/")]
    left = len(listing.images) - len(images)
    if left:
        notes.append(f"Left out {counted(left, 'image')} of '{BACKGROUND}', which is no class.")
    inside = [folder for folder in listing.folders if folder != BACKGROUND]
    classes = Root(root.files, root.path)
    classes.listing = replace(listing, images=images, folders=inside)
    return read_class_folders(classes, {}, notes)
