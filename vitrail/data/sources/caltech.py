"""Caltech-101 in its published layout: class folders, and one folder of background images."""

from __future__ import annotations

from dataclasses import replace

from vitrail.data.sources.class_folders import read_class_folders
from vitrail.data.sources.data_source import DataSource, counted
from vitrail.data.sources.root import Root

CALTECH = "101_ObjectCategories"
BACKGROUND = "BACKGROUND_Google"


def read_caltech(root: Root, notes: list[str]) -> DataSource | None:
    """Read 101_ObjectCategories/<class>/image_0001.jpg."""
    folders = root.folders()
    if root.name != CALTECH and not {BACKGROUND, "Faces_easy"} <= set(folders):
        return None
    if len(folders) < 2:
        return None
    notes.append("Read as Caltech-101 in its original layout.")
    listing = root.listing
    images = [entry for entry in listing.images if not entry.name.startswith(f"{BACKGROUND}/")]
    skipped = len(listing.images) - len(images)
    if skipped:
        notes.append(f"Skipped {counted(skipped, 'image')} in '{BACKGROUND}', which is not a class.")
    class_root = Root(root.files, root.path)
    class_folders = [folder for folder in listing.folders if folder != BACKGROUND]
    class_root.listing = replace(listing, images=images, folders=class_folders)
    return read_class_folders(class_root, {}, notes)
