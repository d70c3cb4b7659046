"""`vitrail explain`: arguments and help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token

from vitrail.cli.options import Device, ImageSize, Quiet
from vitrail.cli.printing import print_json
from vitrail.errors import UserError


def _numbers(_kind: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    """0,5,11 as numbers."""
    try:
        return tuple(int(part) for part in tokens[0].value.split(","))
    except ValueError:
        raise UserError(
            f"blocks and heads are numbers with commas between, as 0,5,11, not '{tokens[0].value}'"
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
    image_size: ImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
) -> None:
    """Show what a network sees: the paper's figures for your weights and images, and whether to trust them.

    The folder --out gets explain.html, explain.json and figures/: embedding filters, similarity of positions,
    attention distance of every head, attention of single heads, attention rollout, and relevance for one class
    rather than another, with deletion, insertion and pointing measured against chance.

    Examples:

    vitrail explain runs/photos photos/

    vitrail explain runs/photos new.jpg --why egret --rather-than heron

    vitrail explain runs/photos photos/ --layers 0,5,11 --heads 0,1,2

    Parameters
    ----------
    weights
        A weights file, a run folder, bundled, or hf-hub:owner/name.
    images
        Image files, folders, .zip archives, tables and Parquet shards; without any, only the weights are shown.
    out
        The folder to write; one in explained/, named after weights and images, if not given.
    layers
        Blocks whose heads are shown, as 0,5,11; the first, middle and last if not given.
    heads
        Heads that are shown, as 0,1,2; the first twelve if not given.
    why
        The class to explain, by name, or by number where classes have none; the predicted one if not given.
    rather_than
        The class to compare with; the likeliest other one if not given.
    shown
        How many images get maps.
    measured
        How many images the maps are judged on, 10 or more; 0 leaves that out. Each takes 80 to 100 forward passes.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    device
        cpu, cuda, or auto.
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
