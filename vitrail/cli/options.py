"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from vitrail.errors import UserError

Setting = Annotated[
    tuple[str, ...], Parameter(name="--set", help="Override a setting: section.key=value. May be repeated.")
]
ModelSetting = Annotated[
    tuple[str, ...],
    Parameter(name="--set", help="Override a setting of the network: model.key=value. May be repeated."),
]
Device = Annotated[str, Parameter(help="cpu, cuda, mps, or auto: the best available.")]
Workers = Annotated[int, Parameter(help="The number of decoding processes; 0: decode in the main process.")]
NoFollow = Annotated[bool, Parameter(help="Skip symbolic links in the data.")]
Quarantine = Annotated[str, Parameter(help="A list of images to skip, written by `vitrail check`.")]
QuietRun = Annotated[bool, Parameter(help="Print only errors.")]
Quiet = Annotated[bool, Parameter(help="Print only errors and the output of --json.")]
Split = Annotated[
    Literal["train", "val", "test", "all", "real"],
    Parameter(help="The split to use; real: the ReaL labels of ImageNet. [default: test, else val, else all]"),
]


def _size(_kind: object, tokens: Sequence[Token]) -> tuple[int, int]:
    """Parse 224 or 224x320 into (height, width)."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?:[x,]([1-9]\d{0,4}))?", tokens[0].value)
    if not match:
        raise UserError(f"--image-size takes pixels, as 224 or 224x320 (height x width), not '{tokens[0].value}'")
    return int(match[1]), int(match[2] or match[1])


def _shots(_kind: object, tokens: Sequence[Token]) -> tuple[int | None, ...]:
    """Parse 1,5,all into (1, 5, None)."""
    shots = [part for token in tokens for part in token.value.split(",")]
    for part in shots:
        if part != "all" and not re.fullmatch(r"[1-9]\d{0,6}", part):
            raise UserError(f"--shots takes numbers separated by commas, such as 1,5,10 or 5,all, not '{part}'")
    return tuple(dict.fromkeys(None if part == "all" else int(part) for part in shots))


def _rates(_kind: object, tokens: Sequence[Token]) -> tuple[float, ...]:
    """Parse 0.001,0.01."""
    try:
        return tuple(float(part) for token in tokens for part in token.value.split(","))
    except ValueError:
        text = " ".join(token.value for token in tokens)
        raise UserError(f"--rates takes numbers separated by commas, such as 0.001,0.01, not '{text}'") from None


ImageSize = Annotated[tuple[int, int], Parameter(converter=_size, n_tokens=1)]
UnstatedImageSize = Annotated[
    ImageSize,
    Parameter(help="Image size in pixels, 224 or 224x320 (height x width), if the weights do not state it."),
]
Rates = Annotated[tuple[float, ...], Parameter(converter=_rates, n_tokens=1)]
Shots = Annotated[tuple[int | None, ...], Parameter(converter=_shots, n_tokens=1)]


@Parameter(name="*")
@dataclass(frozen=True)
class FineTuneOptions:
    """Options for common settings. None leaves a setting to the recipe, or to the automatic choice."""

    epochs: Annotated[float | None, Parameter(help="The number of passes over the training images.")] = None
    steps: Annotated[int | None, Parameter(help="The number of optimizer steps, instead of --epochs.")] = None
    batch_size: Annotated[int | None, Parameter(help="Images per step, over all processes.")] = None
    image_size: Annotated[
        ImageSize | None, Parameter(help="Image size in pixels: 224, or 224x320 (height x width).")
    ] = None
    device: Device | None = None
    workers: Workers | None = None
    precision: Annotated[
        Literal["auto", "fp32", "bf16"] | None, Parameter(help="The number format of matrix products.")
    ] = None

    def passed(self) -> dict[str, object]:
        """Return the options that were passed, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@Parameter(name="*")
@dataclass(frozen=True)
class TrainOptions(FineTuneOptions):
    """The options of FineTuneOptions, with learning rate and seed, which `vitrail transfer` sets itself."""

    lr: Annotated[float | None, Parameter(help="The peak learning rate.")] = None
    seed: Annotated[int | None, Parameter(help="The random seed of the run.")] = None
