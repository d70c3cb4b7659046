"""Small images of coloured noise, the same on every machine, and so difficult that no accuracy is 100 %."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

OLD = Path(__file__).parent / "old"
FIXTURES = Path(__file__).parents[1] / "fixtures"
CENTRES = {"blue": (105, 115, 150), "green": (110, 150, 110), "red": (150, 110, 105)}


def write_image(path: Path, centre: tuple[int, int, int], number: int, size: tuple[int, int] = (20, 24)) -> None:
    """Write an image with a gradient and noise around a colour near that of its class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng([*centre, number])
    rows, columns = np.mgrid[0 : size[0], 0 : size[1]]
    slope = random.normal(0, 3, (2, 3))
    pixels = np.array(centre) + random.normal(0, 25, 3) + random.integers(-30, 30, (*size, 3))
    pixels = pixels + (rows[..., None] - size[0] / 2) * slope[0] + (columns[..., None] - size[1] / 2) * slope[1]
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, compress_level=0)


def folders(root: Path, count: int, first: int = 0) -> None:
    for name, centre in CENTRES.items():
        for number in range(first, first + count):
            write_image(root / name / f"{number:03d}.png", centre, number)


def make(root: Path) -> None:
    """Write all data that cases use."""
    folders(root / "photos", 12)
    folders(root / "unseen", 6, 100)
    for split, first, count in (("train", 200, 8), ("val", 300, 3), ("test", 400, 4)):
        folders(root / "splits" / split, count, first)
    _table(root / "tags")
    _broken(root / "broken")
    with zipfile.ZipFile(root / "unseen.zip", "w") as archive:
        for path in sorted((root / "unseen").rglob("*.png")):
            archive.write(path, path.relative_to(root))
    (root / "empty").mkdir()
    (root / "recipe.toml").write_bytes((OLD / "recipe.toml").read_bytes())


def _table(root: Path) -> None:
    """A CSV dataset with multiple labels per image, weights and groups."""
    rows = ["path,labels,split,group,weight"]
    names = list(CENTRES)
    for number in range(30):
        mixed = np.mean([CENTRES[names[number % 3]], CENTRES[names[number % 2]]], axis=0)
        write_image(root / f"{number:02d}.png", (int(mixed[0]), int(mixed[1]), int(mixed[2])), number)
        labels = "|".join(sorted({names[number % 3], names[number % 2]})) if number % 7 else ""
        split = "train" if number < 18 else "val" if number < 24 else "test"
        rows.append(f"{number:02d}.png,{labels},{split},g{number // 2},{1 + number % 2}")
    (root / "tags.csv").write_text("\n".join(rows) + "\n")


def _broken(root: Path) -> None:
    """A truncated image, a text file with an image extension, a duplicate, and a text file."""
    folders(root, 6, 500)
    whole = (root / "red" / "500.png").read_bytes()
    (root / "red" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (root / "green" / "copy.png").write_bytes(whole)
    (root / "green" / "notes.jpg").write_text("no picture")
    (root / "blue" / "readme.txt").write_text("hello")
