"""Values of a config.json or another JSON file beside weights: each is what it should be, or one sentence says what is
wrong. Where tensors show a setting too, both must agree: other libraries would build whatever config.json says."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from vitrail.config import ModelConfig, Size
from vitrail.errors import UserError

MOST_LABELS = 100_000  # of a network without classifier, whose tensors cannot contradict the number


class Settings:
    """What such a file says. `section`: where in it these values stand, as in `model_args.`."""

    def __init__(self, values: Mapping[str, Any], where: str, section: str = ""):
        self.values, self.where, self.section = values, where, section

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def whole(self, key: str, default: int) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self._wrong(key, value, "which is no whole number")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value, "which is no number")
        return float(value)

    def pick(self, key: str, known: Mapping[Any, str], what: str, default: str = "") -> str:
        """Our word for one of theirs."""
        word = self.get(key, default)
        if not isinstance(word, str | int) or word not in known:
            raise UserError(f"{self.where} has {what} '{word}', and vitrail knows {', '.join(map(str, known))}")
        return known[word]

    def size(self, key: str, default: Size | None = None, asked: Size | None = None) -> Size | None:
        """224 or [224, 320] as (height, width). A size that was asked for cannot be another than one that is here."""
        value = self.get(key)
        told = None if value is None else size_from_json(value, self.where)
        if asked and told and asked != told:
            sizes = ["x".join(map(str, size)) for size in (told, asked)]
            raise UserError(f"{self.where}: its config.json says images of {sizes[0]}, and {sizes[1]} was asked for")
        return told or default

    def per_channel(self, key: str, channels: int) -> tuple[float, ...]:
        """A mean or deviation for each channel; one value that all channels share is repeated."""
        values = self.get(key)
        numbers = isinstance(values, list) and all(type(one) in (int, float) and math.isfinite(one) for one in values)
        if not values or not numbers:
            raise UserError(f"{self.where}: {reprlib.repr(values)} is not a value for each channel")
        if len(values) != channels and len(set(values)) == 1:
            return (values[0],) * channels
        if len(values) != channels:
            raise UserError(f"{self.where}: its preprocessing has {len(values)} channels and its network {channels}")
        return tuple(values)

    def check(self, shown: Mapping[str, Any]) -> None:
        """What the file has of these keys must be what tensors show, to the type; a size may be one number."""
        for key, value in shown.items():
            claim = self.get(key)
            if claim is not None and not _same(claim, value):
                raise self.contradiction(key, value)

    def check_ratio(self, model: ModelConfig) -> None:
        """`mlp_ratio`, of which other libraries take the whole part once multiplied."""
        if self.get("mlp_ratio") is not None and int(model.width * self.number("mlp_ratio", 4)) != model.mlp_dim:
            raise self.contradiction("mlp_ratio", model.mlp_dim / model.width)

    def check_labels(self, count: int) -> None:
        """transformers makes as many logits as it has names."""
        names, labels = self.get("id2label"), self.get("num_labels")
        if names is not None and not isinstance(names, Mapping):
            raise UserError(f"{self.where}: its config.json has an id2label that is no mapping from numbers to names")
        if count and names is not None and len(names) != count:
            raise UserError(f"{self.where}: its config.json names {len(names)} classes, and its tensors show {count}")
        wrong = type(labels) is not int or labels > MOST_LABELS or (count and labels != count)
        if labels is not None and wrong:
            raise self.contradiction("num_labels", count)

    def contradiction(self, key: str, value: Any) -> UserError:
        text = "x".join(map(str, value)) if isinstance(value, tuple) else repr(value)
        return self._wrong(self.section + key, self.get(key), f"and its tensors show {text}")

    def _wrong(self, key: str, value: Any, problem: str) -> UserError:
        return UserError(f"{self.where}: its config.json says {key} {reprlib.repr(value)}, {problem}")


def size_from_json(value: Any, where: str) -> Size:
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list) else ()
    if len(pair) != 2 or not all(type(length) is int and length > 0 for length in pair):
        raise UserError(f"{where}: {reprlib.repr(value)} is not a size in pixels")
    return pair[0], pair[1]


def size_to_json(size: Size) -> int | list[int]:
    """A size as other libraries' configs write it: one number where it is square."""
    return size[0] if size[0] == size[1] else list(size)


def _same(claim: Any, value: Any) -> bool:
    if isinstance(value, tuple):
        pair = [claim, claim] if type(claim) is int else claim
        return isinstance(pair, list) and all(type(one) is int for one in pair) and pair == list(value)
    return type(claim) is type(value) and bool(claim == value)
