"""`vitrail transfer`: fine-tune with the protocol of the paper."""

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
    """Fine-tune with the protocol of the paper: choose a learning rate on a validation split, then train several seeds.

    Parameters
    ----------
    data
        Data with a test split, in any form that `train` takes.
    from_
        Weights to start from: a file, a run folder, "bundled", or "hf-hub:owner/name".
    recipe
        A recipe for fine-tuning, by name or as a .toml file.
    rates
        Learning rates to choose from; by default those of the paper, or three around the rate of another recipe.
    seeds
        Number of final runs.
    out
        The folder of all runs; by default a folder in runs/ with the name of the data. If called again, finished runs
        are used as they are, and a stopped run resumes.
    overrides
        Settings of the recipe, as "section.key=value".
    console
        Where to print; by default the terminal.

    Returns
    -------
    Transfer
        The score of each learning rate, the best one, and the test accuracy of each seed.
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
