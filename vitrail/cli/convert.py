"""`vitrail convert`: arguments and help."""

from __future__ import annotations

from vitrail.cli.options import UnstatedImageSize
from vitrail.weights.formats import FormatName


def convert(
    source: str,
    target: str,
    /,
    *,
    to: FormatName,
    image_size: UnstatedImageSize | None = None,
    allow_pickle: bool = False,
    adopt_constants: bool = False,
    half: bool = False,
    licence: str | None = None,
    overwrite: bool = False,
) -> None:
    """Convert weights between the layouts of vitrail, timm, Hugging Face transformers and google-research.

    Reads weights of vitrail, timm, transformers (ViT, DINOv2, BiT) and google-research (ViT, hybrids, big_vision, BiT).
    If timm or transformers is installed, the result is compared with its network. If the target layout cannot
    represent the network, nothing is written.

    Examples:

    vitrail convert B_16.npz b16.safetensors --to vitrail

    vitrail convert runs/photos photos.safetensors --to vitrail --half

    vitrail convert runs/photos photos-timm --to timm --adopt-constants

    vitrail convert hf-hub:google/vit-base-patch16-224 vit.npz --to google --adopt-constants

    Parameters
    ----------
    source
        A run folder, a weights file, hf-hub:owner/name, or "bundled" (the weights in this package).
    target
        A new file (vitrail: .safetensors, google: .npz) or a new folder (timm, huggingface).
    to
        The layout to write.
    allow_pickle
        Also read .bin, .pt and .pth files; only their tensors are loaded.
    adopt_constants
        Where constants differ (epsilons, GELU, smoothing), use those of the target library.
    half
        Store weights in float16, half the file size (--to vitrail only).
    licence
        The licence to record in the new file.
    overwrite
        Replace an existing target.
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
