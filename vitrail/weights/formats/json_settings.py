"""Typed access to the config.json or another JSON file next to a weights file.

A wrong value raises UserError with the key and the value. So does a setting that contradicts the tensors, since other
libraries build whatever config.json says.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from vitrail.config import ModelConfig, Size
from vitrail.errors import UserError

MAX_LABELS = 100_000  # without a classifier no tensor contradicts num_labels


class Settings:
    """The values of such a file. `section` prefixes keys in messages, as in `model_args.`."""

    def __init__(self, values: Mapping[str, Any], where: str, section: str = ""):
        self.values, self.where, self.section = values, where, section

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def whole(self, key: str, default: int) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self._wrong(key, value, "which is not a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value, "which is not a finite number")
        return float(value)

    def pick(self, key: str, known: Mapping[Any, str], what: str, default: str = "") -> str:
        """Translate the library's name of an option to vitrail's."""
        name = self.get(key, default)
        if not isinstance(name, str | int) or name not in known:
            raise UserError(f"{self.where} has {what} '{name}', and vitrail supports {', '.join(map(str, known))}")
        return known[name]

    def size(self, key: str, default: Size | None = None, requested: Size | None = None) -> Size | None:
        """224 or [224, 320] as (height, width). Raises if the caller requested a different size."""
        value = self.get(key)
        size = None if value is None else size_from_json(value, self.where)
        if requested and size and requested != size:
            stored, wanted = ("x".join(map(str, sides)) for sides in (size, requested))
            raise UserError(f"{self.where} is for {stored} images (config.json), not {wanted}; remove --image-size")
        return size or default

    def per_channel(self, key: str, channels: int) -> tuple[float, ...]:
        """A mean or standard deviation per channel. A list of equal values fits any number of channels."""
        values = self.get(key)
        numbers = isinstance(values, list) and all(type(v) in (int, float) and math.isfinite(v) for v in values)
        if not values or not numbers:
            raise UserError(
                f"{self.where}: {key} must be a list with one number per channel, not {reprlib.repr(values)}"
            )
        if len(values) != channels and len(set(values)) == 1:
            return (values[0],) * channels
        if len(values) != channels:
            raise UserError(f"{self.where}: {key} has {len(values)} channels, and the network has {channels}")
        return tuple(values)

    def check(self, expected: Mapping[str, Any]) -> None:
        """Raise if one of these keys is in the file and differs from what the tensors show, in value or type."""
        for key, value in expected.items():
            stored = self.get(key)
            if stored is not None and not _same(stored, value):
                raise self.contradiction(key, value)

    def check_ratio(self, model: ModelConfig) -> None:
        """Check `mlp_ratio`: other libraries use int(width * mlp_ratio) hidden units."""
        if self.get("mlp_ratio") is not None and int(model.width * self.number("mlp_ratio", 4)) != model.mlp_dim:
            raise self.contradiction("mlp_ratio", model.mlp_dim / model.width)

    def check_labels(self, count: int) -> None:
        """Check `id2label` and `num_labels`: transformers builds one logit per name."""
        names, labels = self.get("id2label"), self.get("num_labels")
        if names is not None and not isinstance(names, Mapping):
            raise UserError(f"{self.where}: id2label in its config.json must map numbers to names")
        if count and names is not None and len(names) != count:
            raise UserError(f"{self.where}: its config.json names {len(names)} classes, and its tensors have {count}")
        wrong = type(labels) is not int or labels > MAX_LABELS or (count and labels != count)
        if labels is not None and wrong:
            raise self.contradiction("num_labels", count)

    def contradiction(self, key: str, value: Any) -> UserError:
        """The error for a key that the tensors contradict."""
        text = "x".join(map(str, value)) if isinstance(value, tuple) else repr(value)
        return self._wrong(self.section + key, self.get(key), f"and its tensors have {text}")

    def _wrong(self, key: str, value: Any, problem: str) -> UserError:
        return UserError(f"{self.where}: its config.json has {key} {reprlib.repr(value)}, {problem}")


def size_from_json(value: Any, where: str) -> Size:
    """224 or [224, 320] as (height, width)."""
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list) else ()
    if len(pair) != 2 or not all(type(length) is int and length > 0 for length in pair):
        raise UserError(f"{where}: {reprlib.repr(value)} is not an image size: use one number or [height, width]")
    return pair[0], pair[1]


def size_to_json(size: Size) -> int | list[int]:
    """A size as other libraries write it: one number if it is square."""
    return size[0] if size[0] == size[1] else list(size)


def _same(stored: Any, value: Any) -> bool:
    if isinstance(value, tuple):
        pair = [stored, stored] if type(stored) is int else stored
        return isinstance(pair, list) and all(type(side) is int for side in pair) and pair == list(value)
    return type(stored) is type(value) and bool(stored == value)
