"""`vitrail predict`: arguments and help."""

from __future__ import annotations

from vitrail.cli.options import Device, ImageSize, NoFollow, Workers
from vitrail.errors import UserError


def predict(
    weights: str,
    /,
    *images: str,
    top: int = 1,
    threshold: float | None = None,
    json: bool = False,
    csv: bool = False,
    image_size: ImageSize | None = None,
    no_follow: NoFollow = False,
    device: Device = "auto",
    workers: Workers | None = None,
) -> None:
    """Label images: files, or every image in a folder.

    Every file that looks like a picture, by its name or its first bytes, gets a row. Where one cannot be read, the row
    says why, and the exit code is 2.

    Examples:

    vitrail predict runs/photos new.jpg

    vitrail predict runs/photos inbox/ --csv > labels.csv

    vitrail predict runs/photos inbox/ --top 3 --threshold 0.5

    Parameters
    ----------
    weights
        A weights file, a run folder, bundled, or hf-hub:owner/name.
    images
        Image files, folders, and anything else that `train` takes: archives, tables, shards, packed folders, CIFAR.
    top
        How many classes to show for each image.
    threshold
        Below this probability the answer is "none of these"; if not given what `evaluate --write` found, else 0, or 0.5
        where images can have several labels.
    json
        One JSON object a line.
    csv
        Comma-separated values.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    device
        cpu, cuda, or auto.
    """
    if not images:
        raise UserError("say which images to label: vitrail predict WEIGHTS IMAGE...")
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
    form = "json" if json else "csv" if csv else "text"
    failed, kinds = print_rows(rows, form, min(top, len(classifier.classes)))
    remarks = make_console(stderr=True)
    for note in [*notes, *kinds]:
        remarks.print(note, markup=False)
    if failed:
        raise UserError(f"{failed} of the images could not be read")
