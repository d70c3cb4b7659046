"""Train on a folder of photos, evaluate the result, and label images with it.

    python examples/own_photos.py photos/ --out runs/photos

The folder holds one folder of images per class. Without a folder, the example trains on the bundled CIFAR-10 images,
which takes about 3 minutes on two CPU cores.
"""

import argparse
from importlib import resources
from pathlib import Path

import vitrail

BUNDLED = str(resources.files("vitrail") / "data" / "bundled" / "cifar10-3000.zip")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a folder of photos.")
    parser.add_argument("photos", nargs="?", default=BUNDLED, help="a folder with one folder of images per class")
    parser.add_argument("--out", type=Path, default=Path("runs/example-photos"))
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()

    # Starts from the bundled network, and keeps a part of the images as a test split.
    result = vitrail.train(
        options.photos,
        from_="bundled",
        recipe="finetune",
        out=options.out,
        overwrite=True,
        epochs=options.epochs,
        batch_size=64,
        device=options.device,
    )
    print(f"{result.scores.headline:.1%} of {result.scores.n} test images are correct, report: {result.report}")

    # `evaluate` measures on the same test images: it skips those that the weights were trained on.
    clf = vitrail.load(result.weights, device=options.device)
    scores = vitrail.evaluate(clf, options.photos, report=options.out / "evaluation.html")
    low, high = scores.interval
    print(f"{scores.headline:.1%} (95 % interval {low:.1%} to {high:.1%})")

    rows = vitrail.predict(clf, options.photos)
    for row in rows[:5]:
        print(row.file, f"{row.prediction.label} {row.prediction.probability:.0%}" if row.prediction else row.error)


if __name__ == "__main__":
    main()
