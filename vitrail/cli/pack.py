"""`vitrail pack`: arguments and help."""

from __future__ import annotations

from vitrail.cli.options import NoFollow


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
