"""`vitrail paper`: arguments and help."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import Device, ImageSize


def paper(
    name: Literal["figure-6", "figure-7", "figure-10", "figure-11"],
    /,
    *weights: str,
    images: tuple[str, ...] = (),
    out: str | None = None,
    image_size: ImageSize | None = None,
    device: Device = "auto",
) -> None:
    """Draw a figure of the paper for given weights.

    figure-6: images under attention rollout. figure-7: embedding filters, similarity of positions, attention distance.
    figure-10: similarity of positions of one network beside others. figure-11: attention distance, likewise.

    Examples:

    vitrail paper figure-7 runs/photos --images photos/

    vitrail paper figure-11 runs/photos runs/hybrid --images photos/ --out distance.png

    Parameters
    ----------
    name
        The figure.
    weights
        Weights files, run folders, bundled, or hf-hub:owner/name; figures 6 and 7 show one network.
    images
        Image files, folders, archives, tables or shards; may be repeated.
    out
        An .svg or .png file; the name of the figure as .svg if not given.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    device
        cpu, cuda, or auto.
    """
    from vitrail.commands.paper import paper

    paper(name, weights, images, out=out, image_size=image_size, device=device)
