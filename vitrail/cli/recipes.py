"""`vitrail recipes`: arguments and help."""

from __future__ import annotations


def recipes(name: str | None = None, /) -> None:
    """List the training recipes, or print one with all its settings.

    Parameters
    ----------
    name
        The recipe to print.
    """
    from vitrail.commands.recipes import show_recipes
    from vitrail.terminal import make_console

    show_recipes(make_console(), name)
