"""`vitrail compare`: arguments and help."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import Device, Quiet
from vitrail.cli.printing import print_json


def compare(
    *runs: str,
    data: str | None = None,
    split: Literal["train", "val", "test", "all", "real"] | None = None,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
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

    found = compare(runs, data=data, split=split, device=device, console=make_console(stderr=json, quiet=quiet))
    if json:
        print_json([row.to_dict() for row in found])
    end_process()
