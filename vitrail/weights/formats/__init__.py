"""The supported checkpoint layouts, one module each. Importing this package imports none of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal

from vitrail.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from vitrail.weights.formats.base import Format

# Module names, in the order in which `read_weights` tries them. Each module defines FORMAT.
FORMATS = ("vitrail", "timm", "huggingface", "google")
if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[FORMATS]  # the choices of the command line


def format_named(name: FormatName) -> Format:
    """Return the layout of this name."""
    if name not in FORMATS:
        raise UserError(f"unknown layout '{name}'; choose from {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")
    layout: Format = import_module(f"vitrail.weights.formats.{name}").FORMAT
    return layout


def formats() -> dict[str, Format]:
    """Return all layouts by name."""
    return {name: format_named(name) for name in FORMATS}
