"""`vitrail demo`: arguments and help."""

from __future__ import annotations


def demo(*, out: str = "runs/demo", again: bool = False) -> None:
    """Compare pre-trained with random starting weights on bundled images, in under five minutes on two CPU cores.

    Fine-tunes the bundled weights, then trains the same network from random weights with the same images and steps.
    Writes a page with the accuracy of both and their attention maps. If stopped, run the same command again to resume.

    Parameters
    ----------
    out
        The output folder: index.html, samples/ and one run folder per network.
    again
        Start over and replace finished runs.
    """
    from vitrail.commands.demo import demo

    demo(out, again=again)
