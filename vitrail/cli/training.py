"""Commands that make and use classifiers. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import shlex
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options import Device, ImageSize, NoFollow, Rates, Setting
from vitrail.errors import UserError
from vitrail.terminal import escape


def demo(*, out: str = "runs/demo", again: bool = False) -> None:
    """See what pre-training is worth, on bundled images, in under five minutes on two cores.

    The bundled weights are fine-tuned, and the same network is trained from random weights with the same images and
    steps. Both are compared on test images, and a page shows what they look at. Stopped, the same command goes on; what
    is finished is used again.

    Parameters
    ----------
    out
        The folder to work in: it gets index.html, samples/ and a run folder for each network.
    again
        Start over, even where there are finished runs.
    """
    from vitrail.commands.demo import demo

    demo(out, again=again)


def train(
    data: str | None = None,
    /,
    *,
    model: str | None = None,
    recipe: str | None = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    out: str | None = None,
    quarantine: str | None = None,
    no_follow: NoFollow = False,
    overrides: Setting = (),
    resume: bool = False,
    accept_changes: bool = False,
    overwrite: bool = False,
) -> None:
    """Train a classifier on a folder of images.

    Whatever is not given is chosen from the data and the machine, and the reason is printed. The run folder gets
    config.toml, metrics.jsonl, checkpoints/, model.safetensors, report.html, answers.csv and model_card.md. Ctrl-C
    saves and stops.

    Examples:

    vitrail train photos/

    vitrail train photos/ --from runs/pets --set train.steps=500

    vitrail train photos/ --model S/16 --recipe scratch --out runs/mine

    vitrail train --resume --out runs/mine

    torchrun --nproc-per-node 8 -m vitrail train photos/ --out runs/mine

    Parameters
    ----------
    data
        A folder or .zip with one folder of images per class, or with train/, val/, test/ folders of such; a .csv or
        .parquet table; Parquet shards; a standard data set as it is distributed (docs/data.md).
    model
        A network by name (see `vitrail models`): S/16, R50+B/16, R50x1, Axial-B/16, ...
    recipe
        A recipe by name (see `vitrail recipes`) or a .toml file.
    from_
        Weights to start from: a file, a run folder, bundled, or hf-hub:owner/name.
    out
        The run folder; if not given, one in runs/ with the name of the data.
    quarantine
        A list of images to leave out, as `vitrail check` writes it.
    overrides
        A setting of the recipe, as section.key=value; may be repeated.
    resume
        Go on exactly where the run in --out stopped, or the newest one in runs/ with the name of the data. With data
        and settings, as in a job that may be started again: start the run if there is none.
    accept_changes
        Go on with --resume though the images or the config.toml of the run have changed.
    overwrite
        Replace the run in --out once the new one is finished. Only files that a run wrote are removed.
    """
    from vitrail.distributed import end_process, is_first
    from vitrail.workflows.train_run import train

    result = train(
        data,
        model=model,
        recipe=recipe,
        from_=from_,
        out=out,
        quarantine=quarantine,
        overrides=(*overrides, "data.follow_links=false") if no_follow else overrides,
        resume=resume,
        accept_changes=accept_changes,
        overwrite=overwrite,
    )
    if result.report is not None and is_first():
        from vitrail.terminal import make_console

        run, console = escape(shlex.quote(str(result.folder))), make_console(lasting=True)
        console.print(f"next:    vitrail predict {run} photo.jpg\nnext:    vitrail evaluate {run} more_photos/")
    end_process()


def transfer(
    data: str,
    /,
    *,
    from_: Annotated[str, Parameter(name="--from")],
    recipe: str = "paper-finetune",
    rates: Rates = (),
    seeds: int = 3,
    out: str | None = None,
    overrides: Setting = (),
) -> None:
    """Fine-tune as the paper measures it, and print the row of the table.

    Learning rates are tried on a part of the training images; with the best one, networks are trained on all of them,
    with several seeds, and the test images are looked at once for each. Stopped and called again, it goes on.

    Examples:

    vitrail transfer cifar-10-batches-bin --from vit.npz --recipe paper-finetune-cifar

    vitrail transfer flowers/ --from runs/pretrained --rates 0.003,0.01 --seeds 5

    Parameters
    ----------
    data
        Images with a test split; anything vitrail train takes.
    from_
        Weights to start from: a file, a run folder, bundled, or hf-hub:owner/name.
    recipe
        A recipe for fine-tuning: a row of Table 4 (paper-finetune-cifar, ...), what they share, or any other.
    rates
        The learning rates to choose from; if not given, the paper's, or three around that of another recipe.
    seeds
        Networks trained in the end.
    out
        The folder of all runs; if not given, one in runs/ with the name of the data.
    overrides
        A setting of the recipe, as section.key=value; may be repeated.
    """
    from vitrail.distributed import end_process
    from vitrail.workflows.transfer import transfer

    transfer(data, from_=from_, recipe=recipe, rates=rates, seeds=seeds, out=out, overrides=overrides)
    end_process()


def predict(
    weights: str,
    /,
    *images: str,
    top: int = 1,
    threshold: float | None = None,
    json: bool = False,
    csv: bool = False,
    image_size: ImageSize | None = None,
    no_follow: NoFollow = False,
    device: Device = "auto",
) -> None:
    """Label images: files, or every image in a folder.

    Every file that looks like a picture, by its name or its first bytes, gets a row. Where one cannot be read, the row
    says why, and the exit code is 2.

    Examples:

    vitrail predict runs/photos new.jpg

    vitrail predict runs/photos inbox/ --csv > labels.csv

    vitrail predict runs/photos inbox/ --top 3 --threshold 0.5

    Parameters
    ----------
    weights
        A weights file, a run folder, bundled, or hf-hub:owner/name.
    images
        Image files, folders, .zip archives, tables and Parquet shards.
    top
        How many classes to show for each image.
    threshold
        Below this probability the answer is "none of these"; if not given what `evaluate --write` found, else 0, or 0.5
        where images can have several labels.
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
    from vitrail.commands.predict import predict

    form = "json" if json else "csv" if csv else "table"
    failed = predict(
        weights,
        images,
        top=top,
        threshold=threshold,
        form=form,
        image_size=image_size,
        follow_links=not no_follow,
        device=device,
    )
    if failed:
        raise UserError(f"{failed} of the images could not be read")
