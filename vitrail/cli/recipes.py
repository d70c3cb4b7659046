"""`vitrail recipes`: arguments and help."""

from __future__ import annotations


def recipes(name: str | None = None, /) -> None:
    """List the training recipes, or show one.

    Parameters
    ----------
    name
        The recipe to show.
    """
    from vitrail.commands.recipes import show_recipes
    from vitrail.terminal import make_console

    show_recipes(make_console(), name)
