"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token

from vitrail.errors import UserError

Setting = Annotated[tuple[str, ...], Parameter(name="--set", help="A setting of the recipe, as section.key=value.")]
Device = Annotated[str, Parameter(help="cpu, cuda, or auto.")]


def _size(_kind: object, tokens: Sequence[Token]) -> tuple[int, int]:
    """224 or 224x320 as (height, width)."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?:[x,]([1-9]\d{0,4}))?", tokens[0].value)
    if not match:
        raise UserError(f"an image size is pixels, as 224 or 224x320 (height x width), not '{tokens[0].value}'")
    return int(match[1]), int(match[2] or match[1])


ImageSize = Annotated[tuple[int, int], Parameter(converter=_size, n_tokens=1)]
