"""`vitrail paper`: arguments and help."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import Device, UnstatedImageSize


def paper(
    name: Literal["figure-6", "figure-7", "figure-10", "figure-11"],
    /,
    *weights: str,
    images: tuple[str, ...] = (),
    out: str | None = None,
    image_size: UnstatedImageSize | None = None,
    device: Device = "auto",
) -> None:
    """Draw a figure of the paper for your weights.

    figure-6: attention rollout on images. figure-7: embedding filters, similarity of position embeddings and attention
    distance. figure-10: similarity of position embeddings, several networks side by side. figure-11: attention
    distance, several networks side by side.

    Examples:

    vitrail paper figure-7 runs/photos --images photos/

    vitrail paper figure-11 runs/photos runs/hybrid --images photos/ --out distance.png

    Parameters
    ----------
    name
        The figure to draw.
    weights
        Run folders, weights files, hf-hub:owner/name, or "bundled". Figures 6 and 7 show one network.
    images
        Image files, folders, archives, tables or shards. May be repeated.
    out
        The .svg or .png file to write. [default: the name of the figure and .svg]
    """
    from vitrail.commands.paper import paper

    paper(name, weights, images, out=out, image_size=image_size, device=device)
