"""`vitrail transfer`: fine-tuning as the paper measures it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vitrail.terminal import make_console
from vitrail.workflows.transfer import Transfer, run_transfer


def transfer(
    data: str | Path,
    *,
    from_: str | Path,
    recipe: str = "paper-finetune",
    rates: Sequence[float] = (),
    seeds: int = 3,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Transfer:
    """Fine-tune by the paper's protocol, and print the row of the table.

    Parameters
    ----------
    data
        Images with a test split; anything `train` takes.
    from_
        Weights to start from: a file, a run folder, "bundled", or "hf-hub:owner/name".
    recipe
        A recipe for fine-tuning, by name or as a .toml file.
    rates
        The learning rates to choose from; if none, the paper's, or three around that of another recipe.
    seeds
        Networks trained in the end.
    out
        The folder of all runs; if None, one in runs/ with the name of the data. Called again, finished runs are taken
        as they are, and one that was stopped resumes.
    overrides
        Settings of the recipe, as "section.key=value".
    console
        Where to print.

    Returns
    -------
    Transfer
        What each learning rate came to, the best one, and the accuracy of each seed on the test images.
    """
    return run_transfer(
        data,
        from_=from_,
        recipe=recipe,
        rates=rates,
        seeds=seeds,
        out=out,
        overrides=overrides,
        console=console or make_console(ignore_write_errors=True),
    )
