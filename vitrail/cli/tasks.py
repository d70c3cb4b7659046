"""Commands that measure what a network has learned by what it makes of other tasks. Nothing heavy is imported before a
command needs it."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.measuring import print_json
from vitrail.cli.options import Device, ImageSize, Setting, Shots
from vitrail.errors import UserError


def fewshot(
    weights: str,
    /,
    *data: str,
    shots: Shots = (1, 5, 10, 25),
    by: tuple[Literal["least-squares", "probe", "knn"], ...] = ("least-squares",),
    form: Literal["paper", "big_vision"] = "paper",
    image_size: ImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Measure frozen features by what can be learned from a few images of each class, on any number of data sets.

    Features are kept in the cache folder: asked again, by another method or with other shots, it takes seconds.

    Examples:

    vitrail fewshot runs/photos photos/ more_photos/

    vitrail fewshot runs/photos photos/ --shots 1,5,all --by least-squares --by probe --by knn

    vitrail fewshot runs/photos photos/ --form big_vision --json

    Parameters
    ----------
    weights
        A weights file, a run folder, bundled, or hf-hub:owner/name.
    data
        Anything `train` takes; without a split of its own, a fifth is held out to measure on.
    shots
        Images of each class to learn from, with commas between; `all` for all.
    by
        Least squares in closed form, a linear probe fitted by L-BFGS, or weighted nearest neighbours; may be repeated.
    form
        How images and penalties of least squares are chosen. paper: the first images of each class, and for each
        number of shots the penalty, of 2^-10 to 2^19, whose rank is best on average over the data sets; big_vision:
        three random draws, and the penalty 2^10.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.commands.fewshot import fewshot, to_json
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    if not data:
        raise UserError("say which images to measure on: vitrail fewshot WEIGHTS DATA...")
    options = {"image_size": image_size, "device": device, "console": make_console(stderr=json)}
    found = fewshot(weights, data, shots=shots, methods=by, form=form, **options)  # type: ignore[arg-type]
    if json:
        print_json(to_json(found))
    end_process()


def knn(
    weights: str,
    /,
    *data: str,
    neighbours: int = 20,
    temperature: float = 0.07,
    image_size: ImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Measure frozen features by the nearest of all training images: nothing is fitted.

    Examples:

    vitrail knn runs/photos photos/

    Parameters
    ----------
    weights
        A weights file, a run folder, bundled, or hf-hub:owner/name.
    data
        Anything `train` takes; without a split of its own, a fifth is held out to measure on.
    neighbours
        How many vote.
    temperature
        Of their votes, exp(cosine similarity / temperature).
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.commands.fewshot import fewshot, to_json
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    if not data:
        raise UserError("say which images to measure on: vitrail knn WEIGHTS DATA...")
    found = fewshot(
        weights,
        data,
        shots=(None,),
        methods=("knn",),
        neighbours=neighbours,
        temperature=temperature,
        image_size=image_size,
        device=device,
        console=make_console(stderr=json),
    )
    if json:
        print_json(to_json(found))
    end_process()


def vtab(
    weights: str | None = None,
    folder: str | None = None,
    /,
    *,
    tasks: tuple[str, ...] = (),
    by: Literal["probe", "finetune"] = "probe",
    out: str | None = None,
    seeds: int = 1,
    overrides: Setting = (),
    image_size: ImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Measure weights on the tasks of VTAB-1k that lie in a folder; without weights, list all 19.

    A task is a folder of its name: with the published lists train800.txt, val200.txt and test.txt, or, of some tasks,
    with the data set as it is published. What is chosen on 200 images, after training on 800, is trained on all 1,000
    and measured on the test images.

    Examples:

    vitrail vtab

    vitrail vtab runs/photos vtab-1k/ --tasks dtd --tasks eurosat

    Parameters
    ----------
    weights
        A weights file, a run folder, bundled, or hf-hub:owner/name.
    folder
        What holds a folder for each task.
    tasks
        Only these, by the names of their folders; may be repeated.
    by
        A linear probe on frozen features, or fine-tuning with the recipe paper-finetune-vtab, for tasks with lists.
    out
        The folder of the runs of fine-tuning; runs/vtab if not given. Called again, it goes on.
    seeds
        Networks fine-tuned on each task.
    overrides
        A setting of the recipe of fine-tuning, as section.key=value; may be repeated.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.commands.vtab import list_tasks, show_tasks, vtab
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    console = make_console(stderr=json)
    if weights is None:
        print_json(list_tasks()) if json else show_tasks(console)
        return
    if folder is None:
        raise UserError("say where the tasks lie: vitrail vtab WEIGHTS FOLDER")
    found = vtab(
        weights,
        folder,
        tasks=tasks,
        by=by,
        out=out,
        seeds=seeds,
        overrides=overrides,
        image_size=image_size,
        device=device,
        console=console,
    )
    if json:
        print_json(found.to_dict())
    end_process()
