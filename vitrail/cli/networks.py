"""Commands about networks and their weights. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import ImageSize, Setting


def plan(
    model: str,
    /,
    *,
    batch: int = 256,
    image_size: ImageSize = (224, 224),
    classes: int = 1000,
    accelerator: str = "H200",
    overrides: Setting = (),
    json: bool = False,
) -> None:
    """What a network costs before anything runs: parameters, multiply-adds, memory and time of a training step.

    Examples:

    vitrail plan B/16

    vitrail plan S/16 --set model.positions=relative --set model.pool=gap

    vitrail plan R50+L/32 --image-size 384 --batch 64 --accelerator A100-80GB

    Parameters
    ----------
    model
        A network by name (see `vitrail models`).
    batch
        Images in a step.
    image_size
        Pixels, as 384 or 384x512 (height x width).
    classes
        How many classes the head tells apart.
    accelerator
        H200, H100, A100-80GB, L4, RTX-4090, ...
    overrides
        A setting of the network, as model.key=value; may be repeated.
    json
        Print the numbers as JSON.
    """
    from vitrail.commands.plan import plan
    from vitrail.terminal import make_console

    console = make_console()
    plan(
        model,
        classes=classes,
        image_size=image_size,
        batch=batch,
        accelerator=accelerator,
        overrides=overrides,
        as_json=json,
        console=console,
    )


def convert(
    source: str,
    target: str,
    /,
    *,
    to: Literal["vitrail", "timm", "huggingface", "google"],
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


def models(*, json: bool = False) -> None:
    """List the networks there are, with their cost at 224 px.

    Parameters
    ----------
    json
        Print the list as JSON.
    """
    from vitrail.commands.models import list_models, show_models
    from vitrail.terminal import make_console

    if json:
        from vitrail import strict_json

        print(strict_json.dumps(list_models()))
    else:
        show_models(make_console())


def recipes(name: str | None = None, /) -> None:
    """List the training recipes, or show one.

    Parameters
    ----------
    name
        The recipe to show.
    """
    from vitrail.commands.models import show_recipes
    from vitrail.terminal import make_console

    show_recipes(make_console(), name)
