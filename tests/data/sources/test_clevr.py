"""CLEVR in its published layout, and the rules of VTAB that derive classes from scenes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.folders import fill, zipped
from vitrail.data.sources.clevr import RULES, read_clevr
from vitrail.errors import UserError


def scenes(root: Path, objects: dict[str, list[list[float]]]) -> Path:
    """Write a CLEVR folder; `objects` has, for each split, the depths of the objects of each scene."""
    for split, depths in objects.items():
        names = [f"CLEVR_{split}_{number:06d}.png" for number in range(len(depths))]
        fill(root, [f"images/{split}/{name}" for name in names])
        written = [
            {"image_filename": name, "objects": [{"pixel_coords": [1, 2, depth]} for depth in values]}
            for name, values in zip(names, depths, strict=True)
        ]
        path = root / "scenes" / f"CLEVR_{split}_scenes.json"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(json.dumps({"info": {}, "scenes": written}))
    fill(root, ["images/test/CLEVR_test_000000.png"])
    return root


def test_counts_and_distances(tmp_path: Path) -> None:
    root = scenes(tmp_path / "data" / "CLEVR_v1.0", {"train": [[9, 8, 12], [11] * 10], "val": [[8.6, 9.7, 20, 30]]})
    for path in (root, root.parent, zipped(root.parent, tmp_path / "clevr.zip")):
        for rule, expected in (
            ("count", ["3 objects", "10 objects", "4 objects"]),
            ("distance", ["up to 8", "beyond 10", "up to 9"]),
        ):
            notes: list[str] = []
            images = read_clevr(path, rule, notes)
            assert images is not None and images.splits == ["train", "train", "test"]
            assert [label for (label,) in images.labels] == expected
            assert any("Ignored 1 image" in note for note in notes)  # of the published test images
    assert read_clevr(tmp_path / "data" / "nothing", "count", []) is None


def test_depth_bins_are_those_of_vtab() -> None:
    """The rule of VTAB: the largest of the thresholds 0, 8, 8.5, 9, 9.5, 10, 100 that is below the depth."""
    thresholds = np.array([0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0])
    for depth in (5.0, 8.0, 8.01, 8.5, 8.7, 9.0, 9.2, 9.5, 9.99, 10.0, 10.01, 40.0):
        label = int(np.flatnonzero(thresholds - depth < 0).max())
        assert RULES["distance"][0]([{"pixel_coords": [0, 0, depth]}, {"pixel_coords": [0, 0, 90.0]}]) == label


def test_wrong_scene_files_are_errors(tmp_path: Path) -> None:
    root = scenes(tmp_path / "clevr", {"train": [[9, 8]], "val": [[9, 8, 9]]})
    with pytest.raises(UserError, match=r"scenes\.json' .*CLEVR_train_000000\.png .*'count'"):  # two objects
        read_clevr(root, "count", [])
    (root / "scenes/CLEVR_val_scenes.json").write_text("[]")
    with pytest.raises(UserError, match=r"CLEVR_val_scenes\.json' is not"):
        read_clevr(root, "distance", [])
    (root / "scenes/CLEVR_val_scenes.json").unlink()
    with pytest.raises(UserError, match=r"CLEVR, but 'scenes/CLEVR_val_scenes\.json' is missing"):
        read_clevr(root, "count", [])
