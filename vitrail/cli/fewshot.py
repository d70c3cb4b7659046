"""`vitrail fewshot`: arguments and help."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import Device, Quiet, Shots, UnstatedImageSize
from vitrail.cli.printing import print_json
from vitrail.errors import UserError


def fewshot(
    weights: str,
    /,
    *data: str,
    shots: Shots = (1, 5, 10, 25),
    by: tuple[Literal["least-squares", "probe", "knn"], ...] = ("least-squares",),
    form: Literal["paper", "big_vision"] = "paper",
    image_size: UnstatedImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
) -> None:
    """Measure frozen features by few-shot classification, on one or more datasets.

    Features are cached: a second call with another method or other shots takes seconds.

    Examples:

    vitrail fewshot runs/photos photos/ more_photos/

    vitrail fewshot runs/photos photos/ --shots 1,5,all --by least-squares --by probe --by knn

    vitrail fewshot runs/photos photos/ --form big_vision --json

    Parameters
    ----------
    weights
        A run folder, a weights file, hf-hub:owner/name, or "bundled" (the weights in this package).
    data
        One or more datasets: anything `vitrail train` reads. Without a split, a fifth of the images is the test split.
    shots
        The number of training images per class, separated by commas; all: every training image.
    by
        The method: closed-form least squares, a linear probe fitted by L-BFGS, or weighted k-nearest neighbours. May be
        repeated.
    form
        The protocol of least squares. paper: take the first images of each class; choose the penalty, from 2^-10 to
        2^19, that ranks best on the test images over all datasets. big_vision: average three random draws of images;
        the penalty is 2^10.
    json
        Print the results as JSON.
    """
    from vitrail.commands.fewshot import fewshot, to_json
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    if not data:
        raise UserError("no dataset given: vitrail fewshot WEIGHTS DATA...")
    options = {"image_size": image_size, "device": device, "console": make_console(stderr=json, quiet=quiet)}
    results = fewshot(weights, data, shots=shots, methods=by, form=form, **options)  # type: ignore[arg-type]
    if json:
        print_json(to_json(results))
    end_process()
