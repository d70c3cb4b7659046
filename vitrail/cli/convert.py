"""`vitrail convert`: arguments and help."""

from __future__ import annotations

from vitrail.cli.options import ImageSize
from vitrail.weights.formats import FormatName


def convert(
    source: str,
    target: str,
    /,
    *,
    to: FormatName,
    image_size: ImageSize | None = None,
    allow_pickle: bool = False,
    adopt_constants: bool = False,
    half: bool = False,
    licence: str | None = None,
    overwrite: bool = False,
) -> None:
    """Turn weights of any layout into any other, and compare with the libraries' own networks.

    Weights are those of vitrail, timm, Hugging Face transformers (ViT, DINOv2, BiT) or google-research (ViT, hybrids,
    big_vision, BiT). Where the target cannot express the network, nothing is written.

    Examples:

    vitrail convert B_16.npz b16.safetensors --to vitrail

    vitrail convert runs/photos photos.safetensors --to vitrail --half

    vitrail convert runs/photos photos-timm --to timm --adopt-constants

    vitrail convert hf-hub:google/vit-base-patch16-224 vit.npz --to google --adopt-constants

    Parameters
    ----------
    source
        A weights file, a folder, bundled, or hf-hub:owner/name.
    target
        A new file (vitrail: .safetensors, google: .npz) or folder (timm, huggingface).
    to
        The layout to write.
    image_size
        Pixels, as 224 or 224x320 (height x width), where the source does not tell.
    allow_pickle
        Open .bin, .pt and .pth files too, as tensors alone.
    adopt_constants
        Take the constants that the target fixes (epsilons, GELU, smoothing) where they differ.
    half
        Store numbers in float16, in half the space (--to vitrail).
    licence
        What the file shall say of its licence, or of the terms of what it was made from.
    overwrite
        Replace what stands at the target.
    """
    from vitrail.commands.convert import convert

    convert(
        source,
        target,
        to,
        image_size=image_size,
        allow_pickle=allow_pickle,
        adopt_constants=adopt_constants,
        half=half,
        licence=licence,
        overwrite=overwrite,
    )
