"""`vitrail vtab`: arguments and help."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import Device, Quiet, Setting, UnstatedImageSize
from vitrail.cli.printing import print_json
from vitrail.errors import UserError


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
    image_size: UnstatedImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
) -> None:
    """Measure weights on the tasks of VTAB-1k, or list its 19 tasks.

    The folder contains one folder per task, with the published lists train800.txt, val200.txt and test.txt, or, for
    some tasks, the dataset as published. Hyperparameters are chosen by training on 800 images and measuring on 200.
    Then all 1,000 are used for training, and the test images are measured once.

    Examples:

    vitrail vtab

    vitrail vtab runs/photos vtab-1k/ --tasks dtd --tasks eurosat

    Parameters
    ----------
    weights
        A run folder, a weights file, hf-hub:owner/name, or "bundled". Without it, the tasks are listed.
    folder
        The folder that contains the task folders.
    tasks
        A task to measure, by its folder name. May be repeated. [default: all that are found]
    by
        A linear probe on frozen features, or fine-tuning with the recipe paper-finetune-vtab (tasks with lists only).
    out
        The folder of the fine-tuning runs. If stopped, run the same command again to resume. [default: runs/vtab]
    seeds
        The number of networks to fine-tune per task.
    json
        Print the results as JSON.
    """
    from vitrail.commands.vtab import list_tasks, show_tasks, vtab
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    console = make_console(stderr=json, quiet=quiet)
    if weights is None:
        print_json(list_tasks()) if json else show_tasks(console)
        return
    if folder is None:
        raise UserError("no task folder given: vitrail vtab WEIGHTS FOLDER")
    result = vtab(
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
        print_json(result.to_dict())
    end_process()
