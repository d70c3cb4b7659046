"""`vitrail evaluate`: arguments and help."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import Device, ImageSize, NoFollow, Quiet
from vitrail.cli.printing import print_json


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
    quiet: Quiet = False,
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

    console = make_console(stderr=json, quiet=quiet)
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
