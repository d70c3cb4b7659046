"""`vitrail check`: arguments and help."""

from __future__ import annotations

import sys

from vitrail.cli.options import NoFollow, Quiet
from vitrail.cli.printing import print_json


def check(
    data: str, /, *, out: str | None = None, no_follow: NoFollow = False, json: bool = False, quiet: Quiet = False
) -> None:
    """Look for what makes training or measuring go wrong: leaks between splits, copies, wrong labels, broken files.

    Nothing is changed. The folder --out gets report.html, report.json and quarantine.csv, the list of images that
    `vitrail train --quarantine` leaves out. The exit code is 1 when there are leaks (near ones, too), groups on both
    sides of a split, exact copies with conflicting labels, classes that do not match, files that cannot be used or
    files that are missing, else 0.

    Examples:

    vitrail check photos/

    vitrail train photos/ --quarantine checks/photos/quarantine.csv

    Parameters
    ----------
    data
        What `vitrail train` takes: a folder, an archive, a table or shards.
    out
        The folder for what is found; one in checks/, named after the data, if not given.
    json
        Print what is found as JSON.
    """
    from vitrail.commands.check import check
    from vitrail.terminal import make_console

    found = check(data, out=out, follow_links=not no_follow, console=make_console(stderr=json, quiet=quiet))
    if json:
        print_json(found.to_dict())
    if found.severe:
        sys.exit(1)
