"""`vitrail models`: arguments and help."""

from __future__ import annotations

from vitrail.cli.printing import print_json


def models(*, json: bool = False) -> None:
    """List the available networks with their parameters and multiply-adds at 224 px, and the pre-trained weights.

    Parameters
    ----------
    json
        Print the list as JSON.
    """
    from vitrail.commands.models import list_models, show_models
    from vitrail.terminal import make_console

    if json:
        print_json(list_models())
    else:
        show_models(make_console())
