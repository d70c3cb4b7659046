"""Commands for data. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys

from vitrail.cli.options import NoFollow


def check(data: str, /, *, out: str | None = None, no_follow: NoFollow = False, json: bool = False) -> None:
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

    found = check(data, out=out, follow_links=not no_follow, console=make_console(stderr=json))
    if json:
        from vitrail import strict_json

        print(strict_json.dumps(found.to_dict()))
    if found.severe:
        sys.exit(1)


def pack(
    data: str,
    out: str,
    /,
    *,
    resize: int | None = None,
    quality: int = 95,
    shard_mb: int = 256,
    no_follow: NoFollow = False,
) -> None:
    """Write a data set into a few large files (Parquet shards), which any disk reads fast in any order.

    Classes, splits and checksums are stored with the images, and training on the folder needs no scan. The shards can
    be read by `datasets` and other Parquet libraries too. A packing that was stopped goes on when called again.

    Examples:

    vitrail pack photos/ photos-packed

    vitrail pack photos/ photos-256 --resize 256

    Parameters
    ----------
    data
        Anything `vitrail train` takes.
    out
        The folder to write.
    resize
        Shrink images to this length of their shorter side; without it their bytes stay as they are.
    quality
        Of the JPEGs written for shrunk images, up to 100.
    shard_mb
        Megabytes of images in a shard.
    """
    from vitrail.commands.pack import pack

    pack(data, out, resize=resize, quality=quality, shard_mb=shard_mb, follow_links=not no_follow)
