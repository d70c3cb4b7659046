"""Commands that measure weights. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import Device, ImageSize, NoFollow


def evaluate(
    weights: str,
    data: str,
    /,
    *,
    split: Literal["train", "val", "test", "all", "real"] | None = None,
    image_size: ImageSize | None = None,
    report: str | None = None,
    quarantine: str | None = None,
    target_accuracy: float | None = None,
    write: bool = False,
    no_follow: NoFollow = False,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Measure weights on images: accuracy with its interval, per class, confusion, calibration, and a report.

    A folder that the weights were trained on is measured on its held-out part only. Under torchrun the processes share
    the images, and the numbers are the same.

    Examples:

    vitrail evaluate runs/photos more_photos/

    vitrail evaluate runs/photos photos/ --json

    vitrail evaluate runs/photos photos/ --target-accuracy 0.95 --write

    Parameters
    ----------
    weights
        A weights file, a run folder, bundled, or hf-hub:owner/name.
    data
        Anything `train` takes.
    split
        Which images, where the data has splits.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    report
        Where to write the HTML report, with a model card beside it; beside the weights if not given.
    quarantine
        A list of images to leave out, as `vitrail check` writes it.
    target_accuracy
        Find the probability from which on at least this share of answers is right, as 0.95.
    write
        Write the fitted temperature, that threshold, or the thresholds of several labels into the weights file, where
        `predict` finds them. The weights themselves stay as they are.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.commands.evaluate import evaluate
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    console = make_console(stderr=json)
    scores = evaluate(
        weights,
        data,
        split=split,
        image_size=image_size,
        report=report,
        quarantine=quarantine,
        target_accuracy=target_accuracy,
        write=write,
        follow_links=not no_follow,
        device=device,
        console=console,
    )
    if json:
        print_json(scores.to_dict())
    end_process()


def compare(
    *runs: str,
    data: str | None = None,
    split: Literal["train", "val", "test", "all", "real"] | None = None,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Compare runs on the same images, with a paired test that tells a difference from chance.

    Every run is compared with the first one. Images that any of them was trained on are left out.

    Examples:

    vitrail compare runs/photos runs/photos-2

    vitrail compare runs/photos runs/photos-2 --data more_photos/

    Parameters
    ----------
    runs
        Run folders or weights files, two or more.
    data
        Images to compare on, anything `train` takes; those the first run held out, if not given.
    split
        Which images, where the data has splits.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.commands.compare import compare
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    found = compare(runs, data=data, split=split, device=device, console=make_console(stderr=json))
    if json:
        print_json([row.to_dict() for row in found])
    end_process()


def print_json(values: object) -> None:
    """Of several processes only the first prints."""
    import os

    from vitrail import strict_json

    if os.environ.get("RANK", "0") == "0":
        print(strict_json.dumps(values))
