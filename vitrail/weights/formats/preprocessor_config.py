"""preprocessor_config.json, which says how transformers makes pixels, as our Preprocess and back."""

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


class Processor(Settings):
    """The file beside weights, over the defaults of its kind; without it, those that go with the network."""

    def __init__(self, source: TensorSource, defaults: Mapping[str, Any]):
        told = source.beside(FILE)
        self.found = told is not None
        kind = str((told or {}).get("image_processor_type") or (told or {}).get("feature_extractor_type") or "")
        by_kind = BIT if kind.startswith("Bit") else VIT if kind else defaults
        super().__init__({**by_kind, **(told or {})}, source.where)

    def _made(self) -> tuple[Size | None, Any]:
        """The size of the images that it makes, and how the file puts it."""
        value = self.get("crop_size" if self.get("do_center_crop") else "size")
        return _pair(value), value

    def image_size(self) -> Size:
        """For networks that do not tell theirs."""
        size, value = self._made()
        if size is None:
            raise UserError(
                f"{self.where}: the {FILE} beside it makes no images of one size, but {reprlib.repr(value)}"
            )
        return size

    def resized(self, size: Size, any_size: bool) -> str:
        """What to say where it makes images of another size than the network's positions are for. `any_size`: its
        networks fit their positions to the image as they run; others would refuse such images."""
        made, value = self._made()
        if not self.found or value is None or made == size:
            return ""
        made_text, text = ("x".join(map(str, pair)) for pair in (self.image_size(), size))
        if not any_size:
            raise UserError(
                f"{self.where}: the {FILE} beside it makes {made_text} images, and its network takes {text}"
            )
        return f"its preprocessing makes {made_text} images, and its positions are for {text}: images are made {text}"

    def preprocess(self, size: Size, channels: int) -> Preprocess:
        """The same steps as ours, for images of `size`."""
        if not self.get("do_rescale", True) or self.get("rescale_factor", 1 / 255) != 1 / 255:
            raise UserError(
                f"{self.where}: its preprocessing does not scale pixels by 1/255, which vitrail's always does"
            )
        if not self.get("do_resize", True):
            raise UserError(f"{self.where}: its preprocessing does not resize images, which vitrail's always does")
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
        """Squash to the size, or scale the short side and crop the centre."""
        target, crops = self.get("size", {}), self.get("do_center_crop")
        short_side = target.get("shortest_edge") if isinstance(target, Mapping) else None
        if short_side is None and not crops:
            return {"resize": "squash"}
        rows, columns = _pair(self.get("crop_size")) or size
        # Of a square alone, ours scales the same side: for others, it is the side that is tighter for the crop.
        if not isinstance(short_side, int) or not crops or not rows == columns <= short_side:
            raise UserError(
                f"{self.where}: vitrail's preprocessing cannot express its resizing to {target} "
                f"and cropping to {rows}x{columns}"
            )
        return {"resize": "short_side", "crop_fraction": rows / short_side}


def _pair(value: Any) -> Size | None:
    """`{"height": 224, "width": 320}`, or 224 for both, as (height, width); None for anything else."""
    sides = (value.get("height"), value.get("width")) if isinstance(value, Mapping) else (value, value)
    return sides if all(type(side) is int and side > 0 for side in sides) else None  # type: ignore[return-value]


def written(spec: Preprocess) -> dict[str, Any]:
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
