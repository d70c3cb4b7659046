"""CLEVR as it is published: pictures of a few solids, and scenes that tell where each of them stands.

It has no classes of its own: a rule makes one of a scene. The rules are those of VTAB.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.sources.image_list import ImageList
from vitrail.data.sources.root import Root, annotated
from vitrail.errors import UserError

UNPACKED = "CLEVR_v1.0"
SPLITS = {"train": "train", "val": "test"}  # the published test images have no scenes
FEWEST, MOST = 3, 10  # objects in a scene
DEPTHS = (8.0, 8.5, 9.0, 9.5, 10.0)

Rule = Callable[[list[dict[str, Any]]], int]  # the objects of a scene -> class


def how_many(objects: list[dict[str, Any]]) -> int:
    return len(objects) - FEWEST


def closest(objects: list[dict[str, Any]]) -> int:
    """Between which depths the closest object stands; one that stands at a depth is not beyond it."""
    return int(np.searchsorted(DEPTHS, min(float(one["pixel_coords"][2]) for one in objects)))


RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "count": (how_many, tuple(f"{number} objects" for number in range(FEWEST, MOST + 1))),
    "distance": (closest, (*(f"up to {depth:g}" for depth in DEPTHS), f"beyond {DEPTHS[-1]:g}")),
}


def read_clevr(place: Path, rule: str, notes: list[str]) -> ImageList | None:
    """images/train/CLEVR_train_000000.png, and scenes/CLEVR_train_scenes.json; nothing if it is not that."""
    root = Root.at(place)
    root = root.under(UNPACKED) if UNPACKED in root.folders() else root
    scenes = {split: f"scenes/CLEVR_{split}_scenes.json" for split in SPLITS}
    if not root.has_all("CLEVR", dict.fromkeys(scenes.values(), ", which tells what its pictures show")):
        return None
    label_of, classes = RULES[rule]
    listed: dict[str, tuple[str, str]] = {}
    for split, name in scenes.items():
        for picture, objects in _scenes(root, name):
            try:
                label = label_of(objects)
            except (KeyError, IndexError, TypeError, ValueError):
                label = -1
            if not 0 <= label < len(classes):
                raise UserError(f"{root.where(name)} has a scene, of {picture}, whose class cannot be told")
            listed[f"images/{split}/{picture}"] = SPLITS[split], classes[label]
    notes.append("Read as CLEVR in its original layout, whose validation images are to measure on.")
    return annotated(root, "images", listed, classes, notes)


def _scenes(root: Root, name: str) -> list[tuple[str, list[dict[str, Any]]]]:
    try:
        scenes = json.loads(root.read(name))["scenes"]
        return [(str(scene["image_filename"]), list(scene["objects"])) for scene in scenes]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{root.where(name)} is not a list of scenes") from None
