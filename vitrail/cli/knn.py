"""`vitrail knn`: arguments and help."""

from __future__ import annotations

from vitrail.cli.options import Device, Quiet, UnstatedImageSize
from vitrail.cli.printing import print_json
from vitrail.errors import UserError


def knn(
    weights: str,
    /,
    *data: str,
    neighbours: int = 20,
    temperature: float = 0.07,
    image_size: UnstatedImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
) -> None:
    """Measure frozen features by k-nearest-neighbour classification, without any fitting.

    Examples:

    vitrail knn runs/photos photos/

    Parameters
    ----------
    weights
        A run folder, a weights file, hf-hub:owner/name, or "bundled" (the weights in this package).
    data
        One or more datasets: anything `vitrail train` reads. Without a split, a fifth of the images is the test split.
    neighbours
        The number of neighbours that vote.
    temperature
        The temperature of the votes, exp(cosine similarity / temperature).
    json
        Print the results as JSON.
    """
    from vitrail.commands.fewshot import fewshot, to_json
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    if not data:
        raise UserError("no dataset given: vitrail knn WEIGHTS DATA...")
    results = fewshot(
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
        print_json(to_json(results))
    end_process()
