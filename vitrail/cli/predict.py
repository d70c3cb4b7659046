"""`vitrail predict`: arguments and help."""

from __future__ import annotations

from vitrail.cli.options import Device, NoFollow, UnstatedImageSize, Workers
from vitrail.errors import UserError


def predict(
    weights: str,
    /,
    *images: str,
    top: int = 1,
    threshold: float | None = None,
    json: bool = False,
    csv: bool = False,
    image_size: UnstatedImageSize | None = None,
    no_follow: NoFollow = False,
    device: Device = "auto",
    workers: Workers | None = None,
) -> None:
    """Predict the labels of images.

    Prints one row per image. If an image cannot be read, its row contains the error, and the exit code is 2.

    Examples:

    vitrail predict runs/photos new.jpg

    vitrail predict runs/photos inbox/ --csv > labels.csv

    vitrail predict runs/photos inbox/ --top 3 --threshold 0.5

    Parameters
    ----------
    weights
        A run folder, a weights file, hf-hub:owner/name, or "bundled" (the weights in this package).
    images
        Image files, folders, or anything else `vitrail train` reads: archives, tables, shards, CIFAR.
    top
        The number of classes to show per image.
    threshold
        The lowest probability of a label; below it, the prediction is "none of these". [default: the value saved by
        `vitrail evaluate --write`, else 0, or 0.5 for multilabel]
    json
        Print one JSON object per line.
    csv
        Print CSV.
    """
    if not images:
        raise UserError("no images given: vitrail predict WEIGHTS IMAGES...")
    from vitrail.cli.prediction_rows import print_rows
    from vitrail.commands.predict import predict_rows
    from vitrail.inference.classifier import load
    from vitrail.terminal import make_console

    classifier, notes = load(weights, image_size=image_size, device=device), list[str]()
    rows = predict_rows(
        classifier,
        images,
        top=top,
        threshold=threshold,
        follow_links=not no_follow,
        workers=workers,
        notes=notes,
    )
    output_format = "json" if json else "csv" if csv else "text"
    failed, summaries = print_rows(rows, output_format, min(top, len(classifier.classes)))
    stderr = make_console(stderr=True)
    for note in [*notes, *summaries]:
        stderr.print(note, markup=False)
    if failed:
        raise UserError(f"{failed} of the images could not be read")
