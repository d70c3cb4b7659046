"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from vitrail.errors import UserError

Setting = Annotated[tuple[str, ...], Parameter(name="--set", help="A setting of the recipe, as section.key=value.")]
Device = Annotated[str, Parameter(help="cpu, cuda, or auto.")]
Workers = Annotated[int, Parameter(help="Processes that decode images; 0: none beside the own.")]
NoFollow = Annotated[bool, Parameter(help="Leave out what links (symbolic links) in the data lead to.")]


def _size(_kind: object, tokens: Sequence[Token]) -> tuple[int, int]:
    """224 or 224x320 as (height, width)."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?:[x,]([1-9]\d{0,4}))?", tokens[0].value)
    if not match:
        raise UserError(f"an image size is pixels, as 224 or 224x320 (height x width), not '{tokens[0].value}'")
    return int(match[1]), int(match[2] or match[1])


ImageSize = Annotated[tuple[int, int], Parameter(converter=_size, n_tokens=1)]


def _shots(_kind: object, tokens: Sequence[Token]) -> tuple[int | None, ...]:
    """1,5,all as (1, 5, None)."""
    words = [word for token in tokens for word in token.value.split(",")]
    for word in words:
        if word != "all" and not re.fullmatch(r"[1-9]\d{0,6}", word):
            raise UserError(f"shots are numbers of images with commas between, as 1,5,10 or 5,all, not '{word}'")
    return tuple(dict.fromkeys(None if word == "all" else int(word) for word in words))


def _rates(_kind: object, tokens: Sequence[Token]) -> tuple[float, ...]:
    """0.001,0.01 as numbers."""
    try:
        return tuple(float(word) for token in tokens for word in token.value.split(","))
    except ValueError:
        given = " ".join(token.value for token in tokens)
        raise UserError(f"learning rates are numbers with commas between, as 0.001,0.01, not '{given}'") from None


Rates = Annotated[tuple[float, ...], Parameter(converter=_rates, n_tokens=1)]
Shots = Annotated[tuple[int | None, ...], Parameter(converter=_shots, n_tokens=1)]
Quiet = Annotated[bool, Parameter(help="Print nothing but results asked for as --json or --csv, and what went wrong.")]


@Parameter(name="*")
@dataclass(frozen=True)
class FineTuning:
    """Everyday settings of a training; what is not given, the recipe says, or it is chosen."""

    epochs: Annotated[float | None, Parameter(help="Times that every training image is seen.")] = None
    steps: Annotated[int | None, Parameter(help="Steps of the optimizer, instead of --epochs.")] = None
    batch_size: Annotated[int | None, Parameter(help="Images in a step, of all processes together.")] = None
    image_size: Annotated[ImageSize | None, Parameter(help="Pixels, as 224 or 224x320 (height x width).")] = None
    device: Annotated[str | None, Parameter(help="cpu, cuda, or auto.")] = None
    workers: Workers | None = None
    precision: Annotated[Literal["auto", "fp32", "bf16"] | None, Parameter(help="Of matrix products.")] = None

    def given(self) -> dict[str, object]:
        """Options that were given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@Parameter(name="*")
@dataclass(frozen=True)
class Training(FineTuning):
    lr: Annotated[float | None, Parameter(help="Largest learning rate.")] = None
    seed: Annotated[int | None, Parameter(help="Of every random number of the run.")] = None
