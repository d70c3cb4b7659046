"""Commands that measure weights. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import Device, ImageSize, Shots


def evaluate(
    weights: str,
    data: str,
    /,
    *,
    split: Literal["train", "val", "test", "all", "real"] | None = None,
    image_size: ImageSize | None = None,
    report: str | None = None,
    quarantine: str | None = None,
    target_accuracy: float | None = None,
    write: bool = False,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Measure weights on images: accuracy with its interval, per class, confusion, calibration, and a report.

    A folder that the weights were trained on is measured on its held-out part only. Under torchrun the processes share
    the images, and the numbers are the same.

    Examples:

    vitrail evaluate runs/photos more_photos/

    vitrail evaluate runs/photos photos/ --json

    vitrail evaluate runs/photos photos/ --target-accuracy 0.95 --write

    Parameters
    ----------
    weights
        A weights file, a run folder, or hf-hub:owner/name.
    data
        Anything `train` takes.
    split
        Which images, where the data has splits.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    report
        Where to write the HTML report; beside the weights if not given.
    quarantine
        A list of images to leave out, as `vitrail check` writes it.
    target_accuracy
        Find the probability from which on at least this share of answers is right, as 0.95.
    write
        Write the fitted temperature, that threshold, or the thresholds of several labels into the weights file, where
        `predict` finds them. The weights themselves stay as they are.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.runs.evaluate import evaluate
    from vitrail.runs.show import make_console
    from vitrail.training.parallel import end_process

    console = make_console(stderr=json)
    scores = evaluate(
        weights,
        data,
        split=split,
        image_size=image_size,
        report=report,
        quarantine=quarantine,
        target_accuracy=target_accuracy,
        write=write,
        device=device,
        console=console,
    )
    if json:
        _print_json(scores.to_dict())
    end_process()


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
        A weights file, a run folder, or hf-hub:owner/name.
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
    from vitrail.errors import UserError
    from vitrail.runs.fewshot import fewshot, to_json
    from vitrail.runs.show import make_console
    from vitrail.training.parallel import end_process

    if not data:
        raise UserError("say which images to measure on: vitrail fewshot WEIGHTS DATA...")
    options = {"image_size": image_size, "device": device, "console": make_console(stderr=json)}
    found = fewshot(weights, data, shots=shots, methods=by, form=form, **options)  # type: ignore[arg-type]
    if json:
        _print_json(to_json(found))
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
        A weights file, a run folder, or hf-hub:owner/name.
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
    from vitrail.errors import UserError
    from vitrail.runs.fewshot import fewshot, to_json
    from vitrail.runs.show import make_console
    from vitrail.training.parallel import end_process

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
        _print_json(to_json(found))
    end_process()


def compare(
    *runs: str,
    data: str | None = None,
    split: Literal["train", "val", "test", "all", "real"] | None = None,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Compare runs on the same images, with a paired test that tells a difference from chance.

    Every run is compared with the first one. Images that any of them was trained on are left out.

    Examples:

    vitrail compare runs/photos runs/photos-2

    vitrail compare runs/photos runs/photos-2 --data more_photos/

    Parameters
    ----------
    runs
        Run folders or weights files, two or more.
    data
        Images to compare on, anything `train` takes; those the first run held out, if not given.
    split
        Which images, where the data has splits.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.runs.compare import compare
    from vitrail.runs.show import make_console
    from vitrail.training.parallel import end_process

    found = compare(runs, data=data, split=split, device=device, console=make_console(stderr=json))
    if json:
        _print_json([row.to_dict() for row in found])
    end_process()


def vtab(
    weights: str | None = None,
    folder: str | None = None,
    /,
    *,
    tasks: tuple[str, ...] = (),
    image_size: ImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
) -> None:
    """Measure weights on the tasks of VTAB-1k that lie in a folder; without weights, list all 19.

    A task is a folder of its name: with the published lists train800.txt, val200.txt and test.txt, or, of some tasks,
    with the data set as it is published. A linear probe on frozen features is fitted to 800 images, its penalty chosen
    on 200, and the one fitted to all 1,000 is measured on the test images.

    Examples:

    vitrail vtab

    vitrail vtab runs/photos vtab-1k/ --tasks dtd --tasks eurosat

    Parameters
    ----------
    weights
        A weights file, a run folder, or hf-hub:owner/name.
    folder
        What holds a folder for each task.
    tasks
        Only these, by the names of their folders; may be repeated.
    image_size
        Pixels, as 224 or 224x320 (height x width), for weights of other libraries that do not tell.
    device
        cpu, cuda, or auto.
    json
        Print the numbers as JSON.
    """
    from vitrail.errors import UserError
    from vitrail.runs.show import make_console
    from vitrail.runs.vtab import list_tasks, show_tasks, vtab
    from vitrail.training.parallel import end_process

    console = make_console(stderr=json)
    if weights is None:
        _print_json(list_tasks()) if json else show_tasks(console)
        return
    if folder is None:
        raise UserError("say where the tasks lie: vitrail vtab WEIGHTS FOLDER")
    found = vtab(weights, folder, tasks=tasks, image_size=image_size, device=device, console=console)
    if json:
        _print_json(found.to_dict())
    end_process()


def _print_json(values: object) -> None:
    """Of several processes only the first prints."""
    import json
    import os

    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(values))
