"""Few-shot classification on frozen features: embed a few images per class, then solve least squares with numpy.

    python examples/fewshot.py --shots 10

Uses the bundled network and CIFAR-10 images; about 15 seconds on two CPU cores. `vitrail fewshot` does the same for
several data sets, with the protocol of the paper.
"""

import argparse
import tempfile
import zipfile
from importlib import resources
from pathlib import Path

import numpy as np

import vitrail


def choose(folder: Path, count: int) -> tuple[list[Path], np.ndarray]:
    """The first `count` images of each class folder, and their labels."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    chosen = [sorted(path.iterdir())[:count] for path in classes]
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in chosen])
    return [file for files in chosen for file in files], labels


def main() -> None:
    parser = argparse.ArgumentParser(description="Few-shot classification on frozen features.")
    parser.add_argument("photos", nargs="?", type=Path, help="a folder with train/ and test/, each with class folders")
    parser.add_argument("--weights", default="bundled")
    parser.add_argument("--shots", type=int, default=10, help="training images per class")
    parser.add_argument("--test", type=int, default=50, help="test images per class")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as unpacked:
        photos = options.photos
        if photos is None:
            photos = Path(unpacked)
            with zipfile.ZipFile(str(resources.files("vitrail") / "data" / "bundled" / "cifar10-3000.zip")) as archive:
                archive.extractall(photos)
        clf = vitrail.load(options.weights, device="auto")
        files, labels = choose(photos / "train", options.shots)
        test_files, test_labels = choose(photos / "test", options.test)
        x, x_test = (vitrail.embed(clf, paths).values.astype(np.float64) for paths in (files, test_files))

    # Ridge regression from standardised features to targets of -1 and 1. With fewer images than features, the dual
    # form solves a smaller system.
    mean, std = x.mean(0), x.std(0) + 1e-5
    x, x_test = (x - mean) / std, (x_test - mean) / std
    targets = 2.0 * np.eye(labels.max() + 1)[labels] - 1
    weights = x.T @ np.linalg.solve(x @ x.T + 100.0 * np.eye(len(x)), targets - targets.mean(0))
    predicted = (x_test @ weights + targets.mean(0)).argmax(1)
    accuracy = (predicted == test_labels).mean()
    print(f"{accuracy:.1%} of {len(test_labels)} test images are correct with {options.shots} images per class")


if __name__ == "__main__":
    main()
