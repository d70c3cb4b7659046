"""The interface of a checkpoint layout, and helpers that the layouts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail import strict_json
from vitrail.atomic import atomic_write
from vitrail.config import ModelConfig, NetworkConfig, Preprocess
from vitrail.errors import UserError
from vitrail.models.pos_embed import build_pos_embed
from vitrail.weights.bundle import Card, Postprocess, check_tensors, created_with
from vitrail.weights.formats.table import State, Table
from vitrail.weights.reference_models import Reference
from vitrail.weights.tensors import TensorSource

ConfigAndState = tuple[NetworkConfig, State]


class ForeignWeights(NamedTuple):
    """The contents of another library's file, as a card and a vitrail state dict."""

    card: Card
    state: dict[str, Tensor]
    assumed: str = ""  # settings that the file does not store, so that defaults were used


def make_card(model: NetworkConfig, preprocess: Preprocess, **fields: Any) -> Card:
    """Build a card created by this version of vitrail."""
    return Card(model=model, preprocess=preprocess, created_with=created_with(), **fields)


def lost_information(card: Card) -> dict[str, object]:
    """Information that only vitrail's layout can store -> whether this card has it."""
    return {
        "the training record (vitrail evaluate can then no longer exclude the training images)": (
            card.recipe or card.data or card.metrics
        ),
        "the temperature and thresholds of its predictions": card.postprocess != Postprocess(),
        "the background colour": set(card.preprocess.background) != {255},
        "dropout and drop_path, which only affect training": (
            isinstance(card.model, ModelConfig) and (card.model.dropout or card.model.drop_path)
        ),
    }


@dataclass(frozen=True)
class Format:
    """One checkpoint layout. A file is read by the first layout that `matches` it."""

    library: str  # the library whose networks it stores
    owner: str  # for messages, as in "timm's"
    # Write a network that has no `unsupported_reason`, after `adopt_constants`.
    write: Callable[[Path, Card, State], None]
    # Why the library cannot represent the network ("has ..."), or None.
    unsupported_reason: Callable[[Card], str | None] = lambda _: None
    # The card with the constants that the library hard-codes.
    adopt_constants: Callable[[Card], Card] = lambda card: card
    # Differences that no constant of the card describes.
    other_differences: Callable[[Card], list[str]] = lambda _: []
    # Information that the layout cannot store -> whether the card has it.
    lost_information: Callable[[Card], Mapping[str, object]] = lost_information
    suffix: str = ""  # of the one file that is written; empty: a folder is written
    matches: Callable[[TensorSource], bool] = lambda _: False
    # Called when no layout matches a file: raises if this layout can tell which network it is.
    check_supported: Callable[[TensorSource], object] = lambda _: None
    read: Callable[[TensorSource, tuple[int, int] | None], ForeignWeights] | None = None
    # The library's own network, with the tensors of a file that was read, or those that it loads from a written one.
    reference_model: Callable[[Path, Card, TensorSource | None], Reference] | None = None
    compared_with: str = ""  # name of that library in messages
    must_load_in_library: bool = True  # whether a file that the library fails to load is an error
    # What a written file reads back as, bit for bit, if that differs from what was written.
    round_trip: Callable[[NetworkConfig, State], ConfigAndState] | None = None

    def check_expressible(self, card: Card, adopt: bool) -> list[str]:
        """Describe how the converted network would differ. Raises UserError if it cannot be converted at all, or if its
        constants would change and `adopt` is not set."""
        if reason := self.unsupported_reason(card):
            raise UserError(f"{self.library} cannot represent this network: it {reason}{self._workaround(card)}")
        changes = _changes(card.model_dump(), self.adopt_constants(card).model_dump())
        if changes and not adopt:
            raise UserError(
                f"{self.library} hard-codes different constants ({'; '.join(changes)}); pass --adopt-constants to "
                "convert anyway and print how much the outputs change"
            )
        return changes + self.other_differences(card)

    @property
    def folder(self) -> bool:
        return not self.suffix

    def _workaround(self, card: Card) -> str:
        """What to do if the representation layer is the only obstacle."""
        if not isinstance(card.model, ModelConfig) or not card.model.representation:
            return ""
        plain = card.model_copy(update={"model": card.model.model_copy(update={"representation": 0})})
        if self.unsupported_reason(plain):
            return ""
        return "; fine-tune it with vitrail train --from, which drops that layer, and convert the result"


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the values that differ, as "key old -> new"."""
    changes: list[str] = []
    for key, value in old.items():
        if isinstance(value, Mapping) and isinstance(new[key], Mapping):
            changes += _changes(value, new[key], f"{prefix}{key}.")
        elif value != new[key]:
            changes.append(f"{prefix}{key} {value} -> {new[key]}")
    return changes


def convert_tensors(
    source: TensorSource,
    table: Table,
    configure: Callable[[State], NetworkConfig],
    adjust: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    """Map a file to a config and a vitrail state dict. Tensors are read only after the mapping worked on their shapes.

    `configure` derives the config from the shapes; `adjust` changes tensors that already have vitrail's names.
    """
    meta = adjust(table.read(source, source.meta_tensors()))
    source.check_floats()
    config = configure(meta)
    shapes = {name: tuple(tensor.shape) for name, tensor in meta.items()}
    check_tensors(shapes, config, source.where, lambda name: source.name_in_file(table.foreign_name(name)))
    return config, adjust(table.read(source, source.load()))


def join_notes(*notes: str) -> str:
    """Join the non-empty notes."""
    return "; ".join(filter(None, notes))


def class_names_in_order(names: Any, count: int) -> tuple[str, ...]:
    """Class names in logit order, from a list or a mapping of indices; empty if there are not exactly `count`."""
    if isinstance(names, Mapping):
        names = [names.get(str(index)) for index in range(len(names))]
    fits = isinstance(names, list) and len(names) == count and None not in names
    return tuple(str(name) for name in names) if fits else ()


def first_reason(reasons: Mapping[str, object]) -> str | None:
    """The first reason that applies, or None."""
    return next((reason for reason, applies in reasons.items() if applies), None)


def missing_features(library: str, features: Mapping[str, object]) -> dict[str, object]:
    """Reasons of the form "has FEATURE, which ..." -> whether each applies."""
    return {f"has {name}, which the networks of {library} do not have": present for name, present in features.items()}


def vitrail_only_features(model: ModelConfig, library: str) -> dict[str, object]:
    """Reasons for features that no other library has -> whether each applies."""
    features = {
        "axial attention": model.axial,
        "relative position embeddings": model.positions == "relative",
        "position embeddings at every layer": model.positions_at != "stem",
    }
    return missing_features(library, features)


def unsupported_crop(spec: Preprocess, library: str, instead: str) -> dict[str, object]:
    """The reason for a non-square crop after an aspect-preserving resize -> whether it applies."""
    size = "x".join(map(str, spec.size))
    reason = f"crops {size} images after a resize that keeps the aspect ratio, and {library} {instead}"
    return {reason: spec.resize == "short_side" and spec.size[0] != spec.size[1]}


def with_position_table(model: ModelConfig, state: State) -> tuple[ModelConfig, State]:
    """Replace computed position embeddings (sincos, or rows plus columns) by the equivalent table."""
    if model.positions not in ("2d", "sincos"):
        return model, state
    positions = build_pos_embed(model)
    prefix = "pos_embed."
    positions.load_state_dict({name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})
    with torch.no_grad():
        table = positions(torch.zeros(1, model.sequence, model.width))[:, model.prefix :]
    others = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
    plain = model.model_copy(update={"positions": "1d", "prefix_positions": False})
    return plain, {**others, "pos_embed.table": table}


def with_prefix_rows(model: ModelConfig, state: State) -> tuple[ModelConfig, State]:
    """Add zero rows for class token and registers to a position table that has only patches."""
    if model.positions != "1d" or model.prefix_positions:
        return model, state
    table = state["pos_embed.table"]
    rows = table.new_zeros(1, model.prefix, model.width)
    config = model.model_copy(update={"prefix_positions": True})
    return config, {**state, "pos_embed.table": torch.cat([rows, table], dim=1)}


def write_folder(folder: Path, tensors: State, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write model.safetensors and JSON files into a folder."""
    from safetensors.torch import save_file

    with atomic_write(folder / "model.safetensors") as temporary:
        save_file(dict(tensors), temporary, metadata={"format": "pt"})
    for name, values in files.items():
        text = strict_json.dumps(values, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
