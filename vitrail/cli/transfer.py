"""`vitrail transfer`: arguments and help."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options import FineTuneOptions, QuietRun, Rates, Setting


def transfer(
    data: str,
    /,
    *,
    from_: Annotated[str, Parameter(name="--from")],
    recipe: str = "paper-finetune",
    rates: Rates = (),
    seeds: int = 3,
    out: str | None = None,
    everyday: FineTuneOptions = FineTuneOptions(),  # noqa: B008
    overrides: Setting = (),
    quiet: QuietRun = False,
) -> None:
    """Fine-tune by the paper's protocol and report the test accuracy.

    The learning rate is chosen on validation images taken from the training split. Then one network per seed is trained
    on all training images and measured once on the test split. If stopped, run the same command again to resume.

    Examples:

    vitrail transfer cifar-10-batches-bin --from vit.npz --recipe paper-finetune-cifar

    vitrail transfer flowers/ --from runs/pretrained --rates 0.003,0.01 --seeds 5

    Parameters
    ----------
    data
        A dataset with a test split: anything `vitrail train` reads.
    from_
        Weights to start from: a run folder, a weights file, hf-hub:owner/name, or "bundled".
    recipe
        A fine-tuning recipe: one row of the paper's Table 4 (paper-finetune-cifar, ...) or any other.
    rates
        The learning rates to try, separated by commas. [default: the paper's, or three around the rate of another
        recipe]
    seeds
        The number of networks to train with the best learning rate.
    out
        The folder of all runs. [default: runs/ and the name of the data]
    """
    from vitrail.commands.transfer import transfer
    from vitrail.config import with_options
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    settings, console = with_options(overrides, everyday.passed()), make_console(ignore_write_errors=True, quiet=quiet)
    transfer(data, from_=from_, recipe=recipe, rates=rates, seeds=seeds, out=out, overrides=settings, console=console)
    end_process()
