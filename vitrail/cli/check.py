"""`vitrail check`: arguments and help."""

from __future__ import annotations

import sys

from vitrail.cli.options import NoFollow, Quiet
from vitrail.cli.printing import print_json


def check(
    data: str, /, *, out: str | None = None, no_follow: NoFollow = False, json: bool = False, quiet: Quiet = False
) -> None:
    """Check a dataset for leaks between splits, duplicates, wrong labels and unreadable files.

    Writes report.html, report.json and quarantine.csv to --out; the data is not changed. quarantine.csv lists the
    images that `vitrail train --quarantine` should skip.

    The exit code is 1 if there are exact or near duplicates between splits, groups in more than one split, exact
    duplicates with different labels, classes that differ between splits, or files that are unreadable or missing.
    Otherwise it is 0.

    Examples:

    vitrail check photos/

    vitrail train photos/ --quarantine checks/photos/quarantine.csv

    Parameters
    ----------
    data
        Anything `vitrail train` reads: a folder, an archive, a table or shards.
    out
        The output folder. [default: checks/ and the name of the data]
    json
        Print the findings as JSON.
    """
    from vitrail.commands.check import check
    from vitrail.terminal import make_console

    result = check(data, out=out, follow_links=not no_follow, console=make_console(stderr=json, quiet=quiet))
    if json:
        print_json(result.to_dict())
    if result.severe:
        sys.exit(1)
