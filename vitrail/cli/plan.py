"""`vitrail plan`: arguments and help."""

from __future__ import annotations

from vitrail.cli.options import ImageSize, ModelSetting


def plan(
    model: str,
    /,
    *,
    batch: int = 256,
    image_size: ImageSize = (224, 224),
    classes: int = 1000,
    accelerator: str = "H200",
    overrides: ModelSetting = (),
    json: bool = False,
) -> None:
    """Estimate parameters, multiply-adds, memory and time of a training step, without running anything.

    Examples:

    vitrail plan B/16

    vitrail plan S/16 --set model.positions=relative --set model.pool=gap

    vitrail plan R50+L/32 --image-size 384 --batch 64 --accelerator A100-80GB

    Parameters
    ----------
    model
        A network by name (see `vitrail models`).
    batch
        Images per step.
    image_size
        Image size in pixels: 384, or 384x512 (height x width).
    classes
        The number of classes.
    accelerator
        The GPU: H200, H100, A100-80GB, L4, RTX-4090, ...
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
