"""`vitrail fewshot`: arguments and help."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import Device, ImageSize, Quiet, Shots
from vitrail.cli.printing import print_json
from vitrail.errors import UserError


def fewshot(
    weights: str,
    /,
    *data: str,
    shots: Shots = (1, 5, 10, 25),
    by: tuple[Literal["least-squares", "probe", "knn"], ...] = ("least-squares",),
    form: Literal["paper", "big_vision"] = "paper",
    image_size: ImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
) -> None:
    """Measure frozen features by what can be learned from a few images of each class, on any number of data sets.

    Features are kept in the cache folder: asked again, by another method or with other shots, it takes seconds.

    Examples:

    vitrail fewshot runs/photos photos/ more_photos/

    vitrail fewshot runs/photos photos/ --shots 1,5,all --by least-squares --by probe --by knn

    vitrail fewshot runs/photos photos/ --form big_vision --json

    Parameters
    ----------
    weights
        A weights file, a run folder, bundled, or hf-hub:owner/name.
    data
        Anything `train` takes; without a split of its own, a fifth is held out to measure on.
    shots
        Images of each class to learn from, with commas between; `all` for all.
    by
        Least squares in closed form, a linear probe fitted by L-BFGS, or weighted nearest neighbours; may be repeated.
    form
        How images and penalties of least squares are chosen. paper: the first images of each class, and for each
        number of shots the penalty, of 2^-10 to 2^19, whose rank is best on average over the data sets; big_vision:
        three random draws, and the penalty 2^10.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.commands.fewshot import fewshot, to_json
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    if not data:
        raise UserError("say which images to measure on: vitrail fewshot WEIGHTS DATA...")
    options = {"image_size": image_size, "device": device, "console": make_console(stderr=json, quiet=quiet)}
    found = fewshot(weights, data, shots=shots, methods=by, form=form, **options)  # type: ignore[arg-type]
    if json:
        print_json(to_json(found))
    end_process()
