"""`vitrail demo`: arguments and help."""

from __future__ import annotations


def demo(*, out: str = "runs/demo", again: bool = False) -> None:
    """See what pre-training is worth, on bundled images, in under five minutes on two cores.

    The bundled weights are fine-tuned, and the same network is trained from random weights with the same images and
    steps. Both are compared on test images, and a page shows what they look at. Stopped, the same command goes on; what
    is finished is used again.

    Parameters
    ----------
    out
        The folder to work in: it gets index.html, samples/ and a run folder for each network.
    again
        Start over, even where there are finished runs.
    """
    from vitrail.commands.demo import demo

    demo(out, again=again)
