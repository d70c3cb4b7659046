"""`vitrail vtab`: arguments and help."""

from __future__ import annotations

from typing import Literal

from vitrail.cli.options import Device, ImageSize, Quiet, Setting
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
    image_size: ImageSize | None = None,
    device: Device = "auto",
    json: bool = False,
    quiet: Quiet = False,
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

    console = make_console(stderr=json, quiet=quiet)
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
