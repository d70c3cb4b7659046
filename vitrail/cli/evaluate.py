"""`vitrail evaluate`: arguments and help."""

from __future__ import annotations

from vitrail.cli.options import Device, NoFollow, Quarantine, Quiet, Split, UnstatedImageSize
from vitrail.cli.printing import print_json


def evaluate(
    weights: str,
    data: str,
    /,
    *,
    split: Split | None = None,
    image_size: UnstatedImageSize | None = None,
    report: str | None = None,
    quarantine: Quarantine | None = None,
    target_accuracy: float | None = None,
    write: bool = False,
    no_follow: NoFollow = False,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
) -> None:
    """Measure accuracy, per-class scores, confusion and calibration on labelled images, and write a report.

    If the weights were trained on the same data, only images that training never saw are measured. Under torchrun, the
    processes share the work and the results are the same.

    Examples:

    vitrail evaluate runs/photos more_photos/

    vitrail evaluate runs/photos photos/ --json

    vitrail evaluate runs/photos photos/ --target-accuracy 0.95 --write

    Parameters
    ----------
    weights
        A run folder, a weights file, hf-hub:owner/name, or "bundled" (the weights in this package).
    data
        Labelled images: anything `vitrail train` reads.
    report
        The HTML report to write; a model card is written next to it. [default: a file next to the weights]
    target_accuracy
        Find the probability threshold above which this fraction of predictions is correct, such as 0.95.
    write
        Save the fitted temperature and thresholds in the weights file, for `vitrail predict`. The weights are
        unchanged.
    json
        Print the results as JSON.
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
