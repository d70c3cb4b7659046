"""The command line: thin subcommands over `vitrail.runs`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from cyclopts import App, Parameter, Token
from rich.console import Console
from rich.markup import escape

from vitrail import __version__
from vitrail.errors import UserError

app = App(
    name="vitrail",
    version=f"vitrail {__version__}",
    help="Vision Transformers: from a folder of images to a trained, measured classifier.",
    help_epilogue="""First steps:

    vitrail demo                                   see it work on bundled images

    vitrail train photos/                          photos/<class>/*.jpg -> runs/photos

    vitrail predict runs/photos new.jpg            use what was trained
""",
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,  # `main` says that the command was stopped
)

Setting = Annotated[tuple[str, ...], Parameter(name="--set", help="A setting of the recipe, as section.key=value.")]
Device = Annotated[str, Parameter(help="cpu, cuda, or auto.")]


def _size(_kind: object, tokens: Sequence[Token]) -> tuple[int, int]:
    """224 or 224x320 as (height, width)."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?:[x,]([1-9]\d{0,4}))?", tokens[0].value)
    if not match:
        raise UserError(f"an image size is pixels, as 224 or 224x320 (height x width), not '{tokens[0].value}'")
    return int(match[1]), int(match[2] or match[1])


ImageSize = Annotated[tuple[int, int], Parameter(converter=_size, n_tokens=1)]


@app.command
def demo(*, out: str = "runs/demo", again: bool = False) -> None:
    """Train, measure and report on the bundled images, in about three minutes on two cores.

    A run that was stopped goes on; a finished one is shown again.

    Parameters
    ----------
    out
        The folder to work in.
    again
        Start over, even when a run is already there.
    """
    from vitrail.runs.demo import demo

    demo(out, again=again)


@app.command
def check(data: str, /, *, out: str | None = None, json: bool = False) -> None:
    """Look for what makes training or measuring go wrong: leaks between splits, copies, wrong labels, broken files.

    Nothing is changed. The folder --out gets report.html, report.json and quarantine.csv, the list of images that
    `vitrail train --quarantine` leaves out. The exit code is 1 when there are leaks, conflicting labels or files that
    cannot be used, else 0.

    Examples:

    vitrail check photos/

    vitrail train photos/ --quarantine checks/photos/quarantine.csv

    Parameters
    ----------
    data
        What `vitrail train` takes: a folder, an archive, a table or shards.
    out
        The folder for what is found; one in checks/, named after the data, if not given.
    json
        Print what is found as JSON.
    """
    from vitrail.runs.check import check
    from vitrail.runs.show import make_console

    found = check(data, out=out, console=make_console(stderr=json))
    if json:
        import json as format_json

        print(format_json.dumps(found.to_dict()))
    if found.severe:
        sys.exit(1)


@app.command
def train(
    data: str | None = None,
    /,
    *,
    model: str | None = None,
    recipe: str | None = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    out: str | None = None,
    quarantine: str | None = None,
    overrides: Setting = (),
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Train a classifier on a folder of images.

    Whatever is not given is chosen from the data and the machine, and the reason is printed. The run folder gets
    config.toml, metrics.jsonl, checkpoints/, model.safetensors and report.html. Ctrl-C saves and stops.

    Examples:

    vitrail train photos/

    vitrail train photos/ --from runs/pets --set train.steps=500

    vitrail train photos/ --model S/16 --recipe scratch --out runs/mine

    vitrail train --resume --out runs/mine

    Parameters
    ----------
    data
        A folder or .zip with one folder of images per class, or with train/, val/, test/ folders of such.
    model
        A network by name (see `vitrail models`): S/16, R50+B/16, R50x1, Axial-B/16, ...
    recipe
        A recipe by name (see `vitrail recipes`) or a .toml file.
    from_
        Weights to start from: a file, a run folder, or hf-hub:owner/name.
    out
        The run folder; runs/<name of the data> if not given.
    quarantine
        A list of images to leave out, as `vitrail check` writes it.
    overrides
        A setting of the recipe, as section.key=value; may be repeated.
    resume
        Go on exactly where the run in --out stopped.
    overwrite
        Replace the run in --out.
    """
    from vitrail.runs.train import train

    train(
        data,
        model=model,
        recipe=recipe,
        from_=from_,
        out=out,
        quarantine=quarantine,
        overrides=overrides,
        resume=resume,
        overwrite=overwrite,
    )


@app.command
def evaluate(
    weights: str,
    data: str,
    /,
    *,
    split: Literal["train", "val", "test", "all"] | None = None,
    image_size: ImageSize | None = None,
    report: str | None = None,
    quarantine: str | None = None,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Measure weights on images: accuracy with its interval, per class, confusion, calibration, and a report.

    A folder that the weights were trained on is measured on its held-out part only.

    Examples:

    vitrail evaluate runs/photos more_photos/

    vitrail evaluate runs/photos photos/ --json

    Parameters
    ----------
    weights
        A weights file, a run folder, or hf-hub:owner/name.
    data
        A folder or .zip with one folder of images per class.
    split
        Which images, where the data has splits.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    report
        Where to write the HTML report; beside the weights if not given.
    quarantine
        A list of images to leave out, as `vitrail check` writes it.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.runs.evaluate import evaluate
    from vitrail.runs.show import make_console

    console = make_console(stderr=json)
    scores = evaluate(
        weights,
        data,
        split=split,
        image_size=image_size,
        report=report,
        quarantine=quarantine,
        device=device,
        console=console,
    )
    if json:
        import json as format_json

        print(format_json.dumps(scores.to_dict()))


@app.command
def predict(
    weights: str,
    /,
    *images: str,
    top: int = 1,
    threshold: float | None = None,
    json: bool = False,
    csv: bool = False,
    image_size: ImageSize | None = None,
    device: Device = "auto",
) -> None:
    """Label images: files, or every image in a folder.

    Examples:

    vitrail predict runs/photos new.jpg

    vitrail predict runs/photos inbox/ --csv > labels.csv

    vitrail predict runs/photos inbox/ --top 3 --threshold 0.5

    Parameters
    ----------
    weights
        A weights file, a run folder, or hf-hub:owner/name.
    images
        Image files and folders.
    top
        How many classes to show for each image.
    threshold
        Below this probability the answer is "none of these"; 0, or 0.5 where images can have several labels.
    json
        One JSON object a line.
    csv
        Comma-separated values.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    device
        cpu, cuda, or auto.
    """
    if not images:
        raise UserError("say which images to label: vitrail predict WEIGHTS IMAGE...")
    from vitrail.runs.predict import predict

    form = "json" if json else "csv" if csv else "table"
    failed = predict(weights, images, top=top, threshold=threshold, form=form, image_size=image_size, device=device)
    if failed:
        raise UserError(f"{failed} of the images could not be read")


@app.command
def pack(
    data: str,
    out: str,
    /,
    *,
    resize: int | None = None,
    quality: int = 95,
    shard_mb: int = 256,
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
    from vitrail.runs.pack import pack

    pack(data, out, resize=resize, quality=quality, shard_mb=shard_mb)


@app.command
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
    from vitrail.runs.estimate import plan
    from vitrail.runs.show import make_console

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


@app.command
def convert(
    source: str,
    target: str,
    /,
    *,
    to: Literal["vitrail", "timm", "huggingface", "google"],
    image_size: ImageSize | None = None,
    allow_pickle: bool = False,
    adopt_constants: bool = False,
    overwrite: bool = False,
) -> None:
    """Turn weights of any layout into any other, and compare with the libraries' own networks.

    Weights are those of vitrail, timm, Hugging Face transformers (ViT, DINOv2, BiT) or google-research (ViT, hybrids,
    big_vision, BiT). Where the target cannot express the network, nothing is written.

    Examples:

    vitrail convert B_16.npz b16.safetensors --to vitrail

    vitrail convert runs/photos photos-timm --to timm --adopt-constants

    vitrail convert hf-hub:google/vit-base-patch16-224 vit.npz --to google --adopt-constants

    Parameters
    ----------
    source
        A weights file, a folder, or hf-hub:owner/name.
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
    overwrite
        Replace what stands at the target.
    """
    from vitrail.runs.convert import convert

    convert(
        source,
        target,
        to,
        image_size=image_size,
        allow_pickle=allow_pickle,
        adopt_constants=adopt_constants,
        overwrite=overwrite,
    )


@app.command
def models(*, json: bool = False) -> None:
    """List the networks there are, with their cost at 224 px.

    Parameters
    ----------
    json
        Print the list as JSON.
    """
    from vitrail.runs.catalogue import list_models, show_models
    from vitrail.runs.show import make_console

    if json:
        import json as format_json

        print(format_json.dumps(list_models()))
    else:
        show_models(make_console())


@app.command
def recipes(name: str | None = None, /) -> None:
    """List the training recipes, or show one.

    Parameters
    ----------
    name
        The recipe to show.
    """
    from vitrail.runs.catalogue import show_recipes
    from vitrail.runs.show import make_console

    show_recipes(make_console(), name)


def main() -> None:
    """Run a command; what the user can fix is one sentence on standard error, never a traceback."""
    for stream in (sys.stdout, sys.stderr):  # file names need not be text; they must not stop the rows after them
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except UserError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _say("stopped")
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        stopped_by = getattr(error, "signal_number", None)  # train.interrupt.Interrupted, whose import needs torch
        if stopped_by is None:
            raise
        _say(escape(str(error)))
        sys.exit(128 + stopped_by)


def _fail(sentence: str, code: int) -> None:
    _say(f"[bold red]error:[/] {escape(sentence)}")
    sys.exit(code)


def _say(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)
