"""`vitrail explain`: arguments and help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token

from vitrail.cli.options import Device, Quiet, UnstatedImageSize
from vitrail.cli.printing import print_json
from vitrail.errors import UserError


def _numbers(_kind: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Parse 0,5,11."""
    try:
        return tuple(int(part) for part in tokens[0].value.split(","))
    except ValueError:
        raise UserError(
            f"--layers and --heads take numbers separated by commas, such as 0,5,11, not '{tokens[0].value}'"
        ) from None


Numbers = Annotated[tuple[int, ...], Parameter(converter=_numbers, n_tokens=1)]


def explain(
    weights: str,
    /,
    *images: str,
    out: str | None = None,
    layers: Numbers | None = None,
    heads: Numbers | None = None,
    why: str | None = None,
    rather_than: str | None = None,
    shown: int = 6,
    measured: int = 64,
    image_size: UnstatedImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
) -> None:
    """Show what a network attends to on your images, and test whether the maps can be trusted.

    Writes explain.html, explain.json and figures/ to --out: embedding filters, similarity of position embeddings,
    attention distance per head, attention of single heads, attention rollout, and relevance of one class against
    another. The maps are tested against random ones by deletion, insertion and pointing.

    Examples:

    vitrail explain runs/photos photos/

    vitrail explain runs/photos new.jpg --why egret --rather-than heron

    vitrail explain runs/photos photos/ --layers 0,5,11 --heads 0,1,2

    Parameters
    ----------
    weights
        A run folder, a weights file, hf-hub:owner/name, or "bundled" (the weights in this package).
    images
        Image files, folders, .zip archives, tables or Parquet shards. Without images, only the weights are shown.
    out
        The output folder. [default: explained/ and the names of weights and images]
    layers
        The blocks to show, counted from 0, such as 0,5,11. [default: the first, middle and last]
    heads
        The heads to show, counted from 0, such as 0,1,2. [default: the first twelve]
    why
        The class to explain: its name, or its number if classes have no names. [default: the predicted class]
    rather_than
        The class to compare with. [default: the most probable other class]
    shown
        The number of images to draw maps for.
    measured
        The number of images to test the maps on: at least 10, or 0 to skip the test. Each takes 80 to 100 forward
        passes.
    json
        Print the numbers as JSON.
    """
    from vitrail.commands.explain import explain
    from vitrail.terminal import make_console

    numbers = explain(
        weights,
        images,
        out=out,
        layers=layers,
        heads=heads,
        why=why,
        rather_than=rather_than,
        shown=shown,
        measured=measured,
        image_size=image_size,
        device=device,
        console=make_console(stderr=json, quiet=quiet),
    )
    if json:
        print_json(numbers)
