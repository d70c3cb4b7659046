"""Conversion between transformers' preprocessor_config.json and vitrail's Preprocess."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from vitrail.config import Preprocess, Size, validate
from vitrail.errors import UserError
from vitrail.weights.formats.json_settings import Settings
from vitrail.weights.tensors import TensorSource

FILE = "preprocessor_config.json"
INTERPOLATION = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# Defaults of transformers' image processors. Every processor other than BiT's is treated as ViT's.
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


class Processor(Settings):
    """The file next to the weights, merged over the defaults of its processor type.

    Without a file, `defaults` apply.
    """

    def __init__(self, source: TensorSource, defaults: Mapping[str, Any]):
        config = source.sibling_json(FILE)
        self.exists = config is not None
        config = config or {}
        kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
        by_kind = BIT if kind.startswith("Bit") else VIT if kind else defaults
        super().__init__({**by_kind, **config}, source.where)

    def _output_size(self) -> tuple[Size | None, Any]:
        """The size of its output images, and the raw value in the file."""
        value = self.get("crop_size" if self.get("do_center_crop") else "size")
        return _pair(value), value

    def image_size(self) -> Size:
        """The output size, for networks whose tensors do not show theirs."""
        size, value = self._output_size()
        if size is None:
            raise UserError(f"{self.where}: its {FILE} has no fixed output size: {reprlib.repr(value)}")
        return size

    def size_note(self, size: Size, any_size: bool) -> str:
        """A note if its output size is not `size`, that of the network's position embeddings; else "".

        `any_size`: transformers interpolates the position embeddings of this network at run time. Otherwise a
        different size is an error.
        """
        output, value = self._output_size()
        if not self.exists or value is None or output == size:
            return ""
        output_text, text = ("x".join(map(str, pair)) for pair in (self.image_size(), size))
        if not any_size:
            raise UserError(f"{self.where}: its {FILE} makes {output_text} images, and its network takes {text}")
        return f"images are resized to {text} for its position embeddings; its {FILE} has {output_text}"

    def preprocess(self, size: Size, channels: int) -> Preprocess:
        """The equivalent Preprocess for images of `size`."""
        if not self.get("do_rescale", True) or self.get("rescale_factor", 1 / 255) != 1 / 255:
            raise UserError(f"{self.where}: its {FILE} does not rescale pixels by 1/255, which vitrail always does")
        if not self.get("do_resize", True):
            raise UserError(f"{self.where}: its {FILE} does not resize images, which vitrail always does")
        normalise = self.get("do_normalize", True)
        values = {
            "size": size,
            "interpolation": self.pick("resample", INTERPOLATION, "resampling"),
            "mean": self.per_channel("image_mean", channels) if normalise else (0.0,) * channels,
            "std": self.per_channel("image_std", channels) if normalise else (1.0,) * channels,
            **self._resize(size),
        }
        return validate(Preprocess, values, f"{self.where} preprocessing")

    def _resize(self, size: Size) -> dict[str, Any]:
        """The resize settings: squash to the size, or resize the short side and crop the center."""
        target, crops = self.get("size", {}), self.get("do_center_crop")
        short_side = target.get("shortest_edge") if isinstance(target, Mapping) else None
        if short_side is None and not crops:
            return {"resize": "squash"}
        rows, columns = _pair(self.get("crop_size")) or size
        # Only for a square crop do both libraries scale the same side.
        if not isinstance(short_side, int) or not crops or not rows == columns <= short_side:
            raise UserError(
                f"{self.where}: vitrail cannot reproduce its {FILE}: resize to {target}, crop to {rows}x{columns}"
            )
        return {"resize": "short_side", "crop_fraction": rows / short_side}


def _pair(value: Any) -> Size | None:
    """`{"height": 224, "width": 320}`, or 224 for both, as (height, width); None for anything else."""
    sides = (value.get("height"), value.get("width")) if isinstance(value, Mapping) else (value, value)
    return sides if all(type(side) is int and side > 0 for side in sides) else None  # type: ignore[return-value]


def to_preprocessor_config(spec: Preprocess) -> dict[str, Any]:
    """The contents of the file for `spec`."""
    height, width = spec.size
    values: dict[str, Any] = {
        "do_resize": True,
        "resample": {name: number for number, name in INTERPOLATION.items()}[spec.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }
    if spec.resize == "squash":
        return values | {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}}
    edge = math.floor(height / spec.crop_fraction + 1e-6)  # rounded as in vitrail's own preprocessing
    crop = {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    return values | {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": edge}, **crop}
