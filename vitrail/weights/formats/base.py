"""What a format of weights files is, and what several of them share."""

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

Expressed = tuple[NetworkConfig, State]


class ForeignWeights(NamedTuple):
    """What a file of another library holds, in our terms."""

    card: Card
    state: dict[str, Tensor]
    assumed: str = ""  # what the file does not say and the reader had to take for granted


def make_card(model: NetworkConfig, preprocess: Preprocess, **told: Any) -> Card:
    return Card(model=model, preprocess=preprocess, created_with=created_with(), **told)


def lost_information(card: Card) -> dict[str, object]:
    """What no layout but ours has a place for, and whether there is any."""
    return {
        "the record of training (evaluate can then no longer leave out the images it was trained on)": (
            card.recipe or card.data or card.metrics
        ),
        "the temperature and thresholds of its answers": card.postprocess != Postprocess(),
        "the background colour": set(card.preprocess.background) != {255},
        "dropout and drop_path, which matter to training alone": (
            isinstance(card.model, ModelConfig) and (card.model.dropout or card.model.drop_path)
        ),
    }


@dataclass(frozen=True)
class Format:
    """One layout of weights files. The first that `matches` a file is the one to `read` it."""

    library: str  # whose networks these are
    owner: str  # whose layout it is, as in "timm's"
    write: Callable[[Path, Card, State], None]  # a network that `cannot` has no objection to, after `adopted`
    unsupported_reason: Callable[[Card], str | None] = lambda _: (
        None
    )  # why it cannot be one of theirs: "has ..."; None if it can
    adopt_constants: Callable[[Card], Card] = lambda card: card  # with the constants that they fix
    other_differences: Callable[[Card], list[str]] = lambda _: []  # what changes all the same, and no constant tells
    lost_information: Callable[[Card], Mapping[str, object]] = (
        lost_information  # what it has no place for, and whether the card has it
    )
    suffix: str = ""  # of the one file that is written; none: it is a folder
    matches: Callable[[TensorSource], bool] = lambda _: False
    check_supported: Callable[[TensorSource], object] = lambda _: (
        None
    )  # says what it knows of a file that none of them matches
    read: Callable[[TensorSource, tuple[int, int] | None], ForeignWeights] | None = None
    # A network of another library with the tensors of a file that was read, or those that it finds in what was written.
    reference_model: Callable[[Path, Card, TensorSource | None], Reference] | None = None
    compared_with: str = ""  # that library, in words
    must_load_in_library: bool = True  # whether it is an error that the library does not take the weights
    round_trip: Callable[[NetworkConfig, State], Expressed] | None = None  # what a file of it reads back as, to the bit

    def check_expressible(self, card: Card, adopt: bool) -> list[str]:
        """What changes in the constants of the network, each as a phrase; it must be nothing unless `adopt` is set."""
        if reason := self.unsupported_reason(card):
            raise UserError(f"{self.library} cannot express this network: it {reason}{self._way_round(card)}")
        changes = _changes(card.model_dump(), self.adopt_constants(card).model_dump())
        if changes and not adopt:
            raise UserError(
                f"{self.library} fixes other constants than these weights have ({'; '.join(changes)}): "
                "add --adopt-constants to take them, and see in the printed difference what that costs"
            )
        return changes + self.other_differences(card)

    @property
    def folder(self) -> bool:
        return not self.suffix

    def _way_round(self, card: Card) -> str:
        """What to do where nothing but the representation layer stands in the way."""
        if not isinstance(card.model, ModelConfig) or not card.model.representation:
            return ""
        plain = card.model_copy(update={"model": card.model.model_copy(update={"representation": 0})})
        way = "; vitrail train --from leaves that layer out, and what it trains can then be converted"
        return "" if self.unsupported_reason(plain) else way


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], start: str = "") -> list[str]:
    found: list[str] = []
    for key, value in old.items():
        if isinstance(value, Mapping) and isinstance(new[key], Mapping):
            found += _changes(value, new[key], f"{start}{key}.")
        elif value != new[key]:
            found.append(f"{start}{key} {value} -> {new[key]}")
    return found


def convert_tensors(
    source: TensorSource,
    table: Table,
    configure: Callable[[State], NetworkConfig],
    adjust: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    """Our config and our tensors. All is tried on shapes first: the contents are read only when everything fits.

    `configure` reads the config off the shapes; `adjust` changes tensors once they have our names.
    """
    blank = adjust(table.read(source, source.blank()))
    source.check_floats()
    config = configure(blank)
    shapes = {name: tuple(tensor.shape) for name, tensor in blank.items()}
    check_tensors(shapes, config, source.where, lambda name: source.called(table.theirs(name)))
    return config, adjust(table.read(source, source.load()))


def join_notes(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def class_names_in_order(names: Any, count: int) -> tuple[str, ...]:
    """Class names in the order of the logits, from a list, or from a mapping of indices; none where they do not fit."""
    if isinstance(names, Mapping):
        names = [names.get(str(index)) for index in range(len(names))]
    fits = isinstance(names, list) and len(names) == count and None not in names
    return tuple(str(name) for name in names) if fits else ()


def first_reason(reasons: Mapping[str, object]) -> str | None:
    """The first reason why a network cannot be expressed that is there; the network is the subject of the sentence."""
    return next((reason for reason, there in reasons.items() if there), None)


def missing_features(library: str, things: Mapping[str, object]) -> dict[str, object]:
    return {f"has {thing}, which the networks of {library} do not have": there for thing, there in things.items()}


def vitrail_only_features(model: ModelConfig, library: str) -> dict[str, object]:
    """What no other library's networks have."""
    things = {
        "attention along rows and columns": model.axial,
        "relative positions": model.positions == "relative",
        "positions at every layer": model.positions_at != "stem",
    }
    return missing_features(library, things)


def unsupported_crop(spec: Preprocess, library: str, otherwise: str) -> dict[str, object]:
    """Crops of a shape that the preprocessing of other libraries does not make."""
    size = "x".join(map(str, spec.size))
    reason = f"takes {size} images cut from pictures that keep their aspect, and {library} {otherwise}"
    return {reason: spec.resize == "short_side" and spec.size[0] != spec.size[1]}


def with_position_table(model: ModelConfig, state: State) -> tuple[ModelConfig, State]:
    """Positions that are computed, from waves or from rows and columns, as the table that they amount to."""
    if model.positions not in ("2d", "sincos"):
        return model, state
    positions = build_pos_embed(model)
    start = "pos_embed."
    positions.load_state_dict({name.removeprefix(start): t for name, t in state.items() if name.startswith(start)})
    with torch.no_grad():
        table = positions(torch.zeros(1, model.sequence, model.width))[:, model.prefix :]
    others = {name: tensor for name, tensor in state.items() if not name.startswith(start)}
    plain = model.model_copy(update={"positions": "1d", "prefix_positions": False})
    return plain, {**others, "pos_embed.table": table}


def with_prefix_rows(model: ModelConfig, state: State) -> tuple[ModelConfig, State]:
    """A table with rows for class token and registers, which are zero where it had none: they add nothing."""
    if model.positions != "1d" or model.prefix_positions:
        return model, state
    table = state["pos_embed.table"]
    rows = table.new_zeros(1, model.prefix, model.width)
    whole = model.model_copy(update={"prefix_positions": True})
    return whole, {**state, "pos_embed.table": torch.cat([rows, table], dim=1)}


def write_folder(folder: Path, tensors: State, files: Mapping[str, Mapping[str, Any]]) -> None:
    """model.safetensors, and JSON files beside it."""
    from safetensors.torch import save_file

    with atomic_write(folder / "model.safetensors") as temporary:
        save_file(dict(tensors), temporary, metadata={"format": "pt"})
    for name, values in files.items():
        text = strict_json.dumps(values, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
