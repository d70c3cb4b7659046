"""The layouts of weights files: one module for each, which reads and writes it. Importing this imports none of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal

from vitrail.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from vitrail.weights.formats.base import Format

# The modules, each with a FORMAT, in the order in which files are tried.
FORMATS = ("vitrail", "timm", "huggingface", "google")
if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[FORMATS]  # what the command line takes


def format_named(name: FormatName) -> Format:
    if name not in FORMATS:
        raise UserError(f"there is no layout '{name}': {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")
    found: Format = import_module(f"vitrail.weights.formats.{name}").FORMAT
    return found


def formats() -> dict[str, Format]:
    return {name: format_named(name) for name in FORMATS}
