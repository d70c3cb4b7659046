"""CLEVR in its published layout: images of simple 3D objects, and scene files that list the objects of each image.

CLEVR has no classes. A rule derives the class of an image from its objects; the rules are those of VTAB.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.sources.data_source import DataSource
from vitrail.data.sources.root import Root, annotated_images
from vitrail.errors import UserError

UNPACKED = "CLEVR_v1.0"
SPLITS = {"train": "train", "val": "test"}  # the published test images have no scenes
MIN_OBJECTS, MAX_OBJECTS = 3, 10  # in a scene
DEPTHS = (8.0, 8.5, 9.0, 9.5, 10.0)

Rule = Callable[[list[dict[str, Any]]], int]  # the objects of a scene -> class


def count_objects(objects: list[dict[str, Any]]) -> int:
    """Return the class for the number of objects."""
    return len(objects) - MIN_OBJECTS


def nearest_depth(objects: list[dict[str, Any]]) -> int:
    """Return the class for the depth of the nearest object. A depth equal to a threshold belongs to the bin below."""
    return int(np.searchsorted(DEPTHS, min(float(item["pixel_coords"][2]) for item in objects)))


RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "count": (count_objects, tuple(f"{number} objects" for number in range(MIN_OBJECTS, MAX_OBJECTS + 1))),
    "distance": (nearest_depth, (*(f"up to {depth:g}" for depth in DEPTHS), f"beyond {DEPTHS[-1]:g}")),
}


def read_clevr(path: Path, rule: str, notes: list[str]) -> DataSource | None:
    """Read images/train/CLEVR_train_000000.png and scenes/CLEVR_train_scenes.json; None if `path` is not CLEVR."""
    root = Root.at(path)
    root = root.under(UNPACKED) if UNPACKED in root.folders() else root
    scenes = {split: f"scenes/CLEVR_{split}_scenes.json" for split in SPLITS}
    if not root.has_all("CLEVR", dict.fromkeys(scenes.values(), " (the objects of each image)")):
        return None
    label_of, classes = RULES[rule]
    annotations: dict[str, tuple[str, str]] = {}
    for split, name in scenes.items():
        for image, objects in _scenes(root, name):
            try:
                label = label_of(objects)
            except (KeyError, IndexError, TypeError, ValueError):
                label = -1
            if not 0 <= label < len(classes):
                raise UserError(f"{root.where(name)} has a scene for {image} that fits no class of the rule '{rule}'")
            annotations[f"images/{split}/{image}"] = SPLITS[split], classes[label]
    notes.append("Read as CLEVR in its original layout. Its validation images are used as the test split.")
    return annotated_images(root, "images", annotations, classes, notes)


def _scenes(root: Root, name: str) -> list[tuple[str, list[dict[str, Any]]]]:
    try:
        scenes = json.loads(root.read(name))["scenes"]
        return [(str(scene["image_filename"]), list(scene["objects"])) for scene in scenes]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{root.where(name)} is not a valid CLEVR scene file") from None
