"""`vitrail transfer`: arguments and help."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options import FineTuning, Quiet, Rates, Setting


def transfer(
    data: str,
    /,
    *,
    from_: Annotated[str, Parameter(name="--from")],
    recipe: str = "paper-finetune",
    rates: Rates = (),
    seeds: int = 3,
    out: str | None = None,
    everyday: FineTuning = FineTuning(),  # noqa: B008
    overrides: Setting = (),
    quiet: Quiet = False,
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
    from vitrail.commands.transfer import transfer
    from vitrail.config import with_options
    from vitrail.distributed import end_process
    from vitrail.terminal import make_console

    settings, console = with_options(overrides, everyday.given()), make_console(ignore_write_errors=True, quiet=quiet)
    transfer(data, from_=from_, recipe=recipe, rates=rates, seeds=seeds, out=out, overrides=settings, console=console)
    end_process()
