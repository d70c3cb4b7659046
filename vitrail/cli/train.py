"""`vitrail train`: arguments and help."""

from __future__ import annotations

import shlex
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options import NoFollow, Quiet, Setting, Training
from vitrail.terminal import escape, make_console


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
    everyday: Training = Training(),  # noqa: B008
    overrides: Setting = (),
    resume: bool = False,
    accept_changes: bool = False,
    overwrite: bool = False,
    quiet: Quiet = False,
) -> None:
    """Train a classifier on a folder of images.

    Whatever is not given is chosen from the data and the machine, and the reason is printed. The run folder gets
    config.toml, metrics.jsonl, checkpoints/, model.safetensors, report.html, predictions.csv and model_card.md. Ctrl-C
    saves and stops.

    Examples:

    vitrail train photos/

    vitrail train photos/ --from runs/pets --epochs 5

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
    from vitrail.distributed import end_process, is_first_process
    from vitrail.workflows.train_run import train

    result = train(
        data,
        model=model,
        recipe=recipe,
        from_=from_,
        out=out,
        quarantine=quarantine,
        overrides=[*overrides, "data.follow_links=false"] if no_follow else overrides,
        resume=resume,
        accept_changes=accept_changes,
        overwrite=overwrite,
        console=make_console(ignore_write_errors=True, quiet=quiet),
        **everyday.given(),
    )
    if result.report is not None and is_first_process():
        run, console = escape(shlex.quote(str(result.folder))), make_console(ignore_write_errors=True, quiet=quiet)
        console.print(f"next:    vitrail predict {run} photo.jpg\nnext:    vitrail evaluate {run} more_photos/")
    end_process()
