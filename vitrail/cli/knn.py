"""`vitrail knn`: arguments and help."""

from __future__ import annotations

from vitrail.cli.options import Device, ImageSize, Quiet
from vitrail.cli.printing import print_json
from vitrail.errors import UserError


def knn(
    weights: str,
    /,
    *data: str,
    neighbours: int = 20,
    temperature: float = 0.07,
    image_size: ImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
) -> None:
    """Measure frozen features by the nearest of all training images: nothing is fitted.

    Examples:

    vitrail knn runs/photos photos/

    Parameters
    ----------
    weights
        A weights file, a run folder, bundled, or hf-hub:owner/name.
    data
        Anything `train` takes; without a split of its own, a fifth is held out to measure on.
    neighbours
        How many vote.
    temperature
        Of their votes, exp(cosine similarity / temperature).
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
        raise UserError("say which images to measure on: vitrail knn WEIGHTS DATA...")
    found = fewshot(
        weights,
        data,
        shots=(None,),
        methods=("knn",),
        neighbours=neighbours,
        temperature=temperature,
        image_size=image_size,
        device=device,
        console=make_console(stderr=json, quiet=quiet),
    )
    if json:
        print_json(to_json(found))
    end_process()
