"""`vitrail compare`: arguments and help."""

from __future__ import annotations

from vitrail.cli.options import Device, Quiet, Split
from vitrail.cli.printing import print_json


def compare(
    *runs: str,
    data: str | None = None,
    split: Split | None = None,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
) -> None:
    """Compare runs on the same images, with a paired significance test.

    Each run is compared with the first one. Images that any of the runs was trained on are skipped.

    Examples:

    vitrail compare runs/photos runs/photos-2

    vitrail compare runs/photos runs/photos-2 --data more_photos/

    Parameters
    ----------
    runs
        Two or more run folders or weights files.
    data
        The images to compare on: anything `vitrail train` reads. [default: the test images of the first run]
    json
        Print the results as JSON.
    """
    from vitrail.commands.compare import compare
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    compared = compare(runs, data=data, split=split, device=device, console=make_console(stderr=json, quiet=quiet))
    if json:
        print_json([row.to_dict() for row in compared])
    end_process()
