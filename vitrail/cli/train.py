"""`vitrail train`: arguments and help."""

from __future__ import annotations

import shlex
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options import NoFollow, Quarantine, QuietRun, Setting, TrainOptions
from vitrail.terminal import escape, make_console


def train(
    data: str | None = None,
    /,
    *,
    model: str | None = None,
    recipe: str | None = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    out: str | None = None,
    quarantine: Quarantine | None = None,
    no_follow: NoFollow = False,
    everyday: TrainOptions = TrainOptions(),  # noqa: B008
    overrides: Setting = (),
    resume: bool = False,
    accept_changes: bool = False,
    overwrite: bool = False,
    quiet: QuietRun = False,
) -> None:
    """Train a classifier on a folder of images.

    Settings that you do not pass are chosen from the data and the machine; each choice is printed with its reason. The
    run folder contains config.toml, metrics.jsonl, checkpoints/, model.safetensors, report.html, predictions.csv and
    model_card.md. Ctrl-C saves a checkpoint and stops.

    Examples:

    vitrail train photos/

    vitrail train photos/ --from runs/pets --epochs 5

    vitrail train photos/ --model S/16 --recipe scratch --out runs/mine

    vitrail train --resume --out runs/mine

    torchrun --nproc-per-node 8 -m vitrail train photos/ --out runs/mine

    Parameters
    ----------
    data
        A folder or .zip with one folder of images per class, or with train/, val/ and test/ folders of these; a .csv or
        .parquet table; Parquet shards; or a standard dataset as published (docs/data.md).
    model
        A network by name, such as S/16, R50+B/16, R50x1 or Axial-B/16 (see `vitrail models`).
    recipe
        A recipe by name (see `vitrail recipes`), or a .toml file.
    from_
        Weights to start from: a run folder, a weights file, hf-hub:owner/name, or "bundled".
    out
        The run folder. [default: runs/ and the name of the data]
    resume
        Resume the run in --out, or the newest run in runs/ of this data, from its last checkpoint. If there is none,
        start it, so that a cluster job can always use the same command.
    accept_changes
        Resume even if the images or the config.toml of the run have changed.
    overwrite
        Replace the run in --out once the new run is finished. Only files written by a run are removed.
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
        **everyday.passed(),
    )
    if result.report is not None and is_first_process():
        run, console = escape(shlex.quote(str(result.folder))), make_console(ignore_write_errors=True, quiet=quiet)
        console.print(f"next:    vitrail predict {run} photo.jpg\nnext:    vitrail evaluate {run} more_photos/")
    end_process()
