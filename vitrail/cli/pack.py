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
    """Write a dataset into a few large Parquet shards, which are fast to read in any order.

    The shards contain images, classes, splits and checksums, so training on them needs no scan. Hugging Face
    datasets and other Parquet libraries can read them too. If stopped, run the same command again to resume.

    Examples:

    vitrail pack photos/ photos-packed

    vitrail pack photos/ photos-256 --resize 256

    Parameters
    ----------
    data
        Anything `vitrail train` reads.
    out
        The output folder.
    resize
        Shrink images to this length of the shorter side, in pixels. Without it, files are stored unchanged.
    quality
        The JPEG quality of shrunk images, 1 to 100.
    shard_mb
        The size of a shard in megabytes.
    """
    from vitrail.commands.pack import pack

    pack(data, out, resize=resize, quality=quality, shard_mb=shard_mb, follow_links=not no_follow)
