"""preprocessor_config.json, which says how transformers makes pixels, as our Preprocess and back."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.config import Preprocess, Size, validate
from vitrail.errors import UserError
from vitrail.weights.foreign import per_channel, pick, read_json

FILE = "preprocessor_config.json"
INTERPOLATION = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# What transformers' image processors do where the file does not say; any other than BiT's is taken for ViT's.
VIT: dict[str, Any] = {
    "do_center_crop": False,
    "resample": 2,
    "size": {"height": 224, "width": 224},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
BIT: dict[str, Any] = {
    "do_center_crop": True,
    "resample": 3,
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class Processor(NamedTuple):
    settings: Mapping[str, Any]  # the file's, over the defaults of its kind
    found: bool  # whether there is a file


def read_processor(folder: Path, defaults: Mapping[str, Any]) -> Processor:
    """The file in `folder`; `defaults` are those of the processor that goes with the network."""
    path = folder / FILE
    if not path.is_file():
        return Processor(defaults, False)
    told = read_json(path)
    kind = str(told.get("image_processor_type") or told.get("feature_extractor_type") or "")
    by_kind = BIT if kind.startswith("Bit") else VIT if kind else defaults
    return Processor({**by_kind, **told}, True)


def image_size(processor: Processor, where: str) -> Size:
    """The size of the images that it makes, for networks that do not tell theirs."""
    told = processor.settings
    value = told.get("crop_size" if told["do_center_crop"] else "size")
    size = _pair(value)
    if size is None:
        raise UserError(f"{where}: the {FILE} beside it makes no images of one size, but {reprlib.repr(value)}")
    return size


def _pair(value: Any) -> Size | None:
    """`{"height": 224, "width": 320}`, or 224 for both, as (height, width); None for anything else."""
    sides = (value.get("height"), value.get("width")) if isinstance(value, Mapping) else (value, value)
    return sides if all(type(side) is int and side > 0 for side in sides) else None  # type: ignore[return-value]


def resized(processor: Processor, size: Size, any_size: bool, where: str) -> str:
    """What to say where it makes images of another size than the network's positions are for. `any_size`: its
    networks fit their positions to the image as they run; others would refuse such images."""
    told = processor.settings
    value = told.get("crop_size" if told["do_center_crop"] else "size")
    made = _pair(value)
    if not processor.found or value is None or made == size:
        return ""
    if made is None:
        raise UserError(f"{where}: the {FILE} beside it makes no images of one size, but {reprlib.repr(value)}")
    made_text, text = ("x".join(map(str, pair)) for pair in (made, size))
    if not any_size:
        raise UserError(f"{where}: the {FILE} beside it makes {made_text} images, and its network takes {text}")
    return f"its preprocessing makes {made_text} images, and its positions are for {text}: images are made {text}"


def preprocess(processor: Processor, size: Size, channels: int, where: str) -> Preprocess:
    """The same steps as ours, for images of `size`."""
    told = processor.settings
    if not told.get("do_rescale", True) or told.get("rescale_factor", 1 / 255) != 1 / 255:
        raise UserError(f"{where}: its preprocessing does not scale pixels by 1/255, which vitrail's always does")
    if not told.get("do_resize", True):
        raise UserError(f"{where}: its preprocessing does not resize images, which vitrail's always does")
    normalise = told.get("do_normalize", True)
    values = dict(
        size=size,
        interpolation=pick(told["resample"], INTERPOLATION, "resampling", where),
        mean=per_channel(told["image_mean"] if normalise else [0.0], channels, where),
        std=per_channel(told["image_std"] if normalise else [1.0], channels, where),
        **_resize(told, size, where),
    )
    return validate(Preprocess, values, f"{where} preprocessing")


def _resize(told: Mapping[str, Any], size: Size, where: str) -> dict[str, Any]:
    """Squash to the size, or scale the short side and crop the centre."""
    target, crops = told.get("size", {}), told["do_center_crop"]
    short_side = target.get("shortest_edge") if isinstance(target, Mapping) else None
    if short_side is None and not crops:
        return {"resize": "squash"}
    rows, columns = _pair(told.get("crop_size")) or size
    # Of a square alone, ours scales the same side: for others, it is the side that is tighter for the crop.
    if not isinstance(short_side, int) or not crops or not rows == columns <= short_side:
        raise UserError(
            f"{where}: vitrail's preprocessing cannot express its resizing to {target} and cropping to {rows}x{columns}"
        )
    return {"resize": "short_side", "crop_fraction": rows / short_side}


def settings(spec: Preprocess) -> dict[str, Any]:
    """What the file says for `spec`, which keeps the aspect for squares alone."""
    height, width = spec.size
    values: dict[str, Any] = {
        "do_resize": True,
        "resample": {ours: theirs for theirs, ours in INTERPOLATION.items()}[spec.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }
    if spec.resize == "squash":
        return values | {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}}
    edge = math.floor(height / spec.crop_fraction + 1e-6)  # as our own preprocessing rounds it
    crop = {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    return values | {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": edge}, **crop}
