"""Our one artifact, `model.safetensors`: the weights, and one JSON document in the header that says what they are.

Importing this does not import torch, so that a command can read a card at once.
"""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)

import vitrail
from vitrail import strict_json
from vitrail.atomic import atomic_write
from vitrail.config import NetworkConfig, Preprocess, ResNetConfig, Schema, validate
from vitrail.config.legacy_settings import current_section, current_settings
from vitrail.config.postprocess import Postprocess
from vitrail.errors import Note, UserError
from vitrail.models.legacy_names import new_names
from vitrail.weights.checksum import Checksums, header_matches, tensors_checksum, with_checksums
from vitrail.weights.safetensors_file import Header, load_float_tensors, load_tensors, read_header, replace_metadata

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 3  # from 2 on, a file has checksums; from 3 on, tensors of Vision Transformers have timm's names
METADATA_KEY = "vitrail"  # the only metadata key: safetensors writes several keys in no fixed order
TRAINED_ON = "vitrail.trained_on"  # the tensor of the digests of training images, which no network has
DIGEST = 8  # bytes of each
FAR_MORE = 100  # times what a file holds: a network that large is not even built as shapes
DTYPE_NAMES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float64": "F64"}
DTYPE_NAMES |= {"torch.uint8": "U8"}

Digests = Annotated[list[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]], FailFast()]


def _task(value: object) -> object:
    """The name of a task. Earlier files only say whether an image can have several labels."""
    return {False: "classification", True: "multilabel"}[value] if isinstance(value, bool) else value


class _Known(BaseModel):
    """What commands read of the card's open sections; other keys may stand beside it."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Data(_Known):
    name: str = ""
    fingerprint: str = ""
    images: dict[str, int] = Field(default_factory=dict)
    given_split: bool = False
    test_fraction: float = 0
    val_fraction: float = 0
    split_seed: int = 0
    group_similar: bool = False
    max_pixels: int = Field(default=1, gt=0)
    trained_on: Digests = []  # of files before format 2: those that sort first
    trained_before: Annotated[list[Digests], FailFast()] = []  # likewise, of the weights that these came from


class _Recipe(_Known):
    model: dict[str, Any] = Field(default_factory=dict)
    objective: dict[str, Any] = Field(default_factory=dict)


def _current_data(data: object) -> object:
    return current_section("data", data)


def _like(known: type[_Known]) -> AfterValidator:
    def check(values: dict[str, Any]) -> dict[str, Any]:
        try:
            known.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"'{'.'.join(map(str, first['loc']))}': {first['msg']}") from None
        return values

    return AfterValidator(check)


def _stepped(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    if not all("step" in row for row in rows):
        raise ValueError("a row has no step")
    return rows


class Card(Schema):
    """What a weights file says about itself: enough to use the weights rightly and to trace where they came from."""

    model_config = ConfigDict(populate_by_name=True)

    format: int = FORMAT
    model: NetworkConfig
    preprocess: Preprocess
    classes: Annotated[
        tuple[str, ...], FailFast()
    ] = ()  # in the order of the logits; empty: the weights came without names
    # What the logits are, a name of `vitrail.tasks.table.TASKS`
    task: Annotated[str, BeforeValidator(_task)] = Field(
        "classification", validation_alias=AliasChoices("task", "several")
    )
    postprocess: Postprocess = Field(default=Postprocess(), validation_alias=AliasChoices("postprocess", "answering"))
    recipe: Annotated[dict[str, Any], BeforeValidator(current_settings), _like(_Recipe)] = Field(
        default_factory=dict
    )  # the resolved run config
    data: Annotated[dict[str, Any], BeforeValidator(_current_data), _like(_Data)] = Field(
        default_factory=dict
    )  # fingerprint, name, counts, split rule
    metrics: dict[str, Any] = Field(default_factory=dict)
    curves: Annotated[list[dict[str, float]], AfterValidator(_stepped)] = Field(default_factory=list)  # in few points
    source: str = ""  # where the starting weights came from
    licence: str = ""  # of the data and of the starting weights
    stored: Literal["float32", "float16"] = "float32"  # the numbers in the file; they are computed with in float32
    created_with: str = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Card:
        if self.classes and len(self.classes) != self.model.num_classes:
            raise ValueError(f"{len(self.classes)} class names for {self.model.num_classes} logits")
        if self.postprocess.thresholds and len(self.postprocess.thresholds) != self.model.num_classes:
            raise ValueError(f"{len(self.postprocess.thresholds)} thresholds for {self.model.num_classes} logits")
        if self.preprocess.size != self.model.image_size:
            made, taken = ("x".join(map(str, size)) for size in (self.preprocess.size, self.model.image_size))
            raise ValueError(f"preprocessing makes {made} images, and the network takes {taken}")
        if self.preprocess.channels != self.model.channels:
            raise ValueError(
                f"preprocessing for {self.preprocess.channels} channels, network for {self.model.channels}"
            )
        return self


def created_with() -> str:
    """The versions that make a file, such as `vitrail 0.1.0, torch 2.13.0`."""
    return f"vitrail {vitrail.__version__}, torch {metadata.version('torch').partition('+')[0]}"


def read_card(path: str | Path) -> Card:
    """What a vitrail weights file says about itself, without reading the weights."""
    return _document(read_header(path), path)[0]


def _document(header: Header, path: str | Path) -> tuple[Card, Checksums | None]:
    """The card, and the checksums beside it, which files of the first format do not have."""
    if METADATA_KEY not in header.metadata:
        raise UserError(f"'{path}' was not written by vitrail: its header has no vitrail document")
    try:
        values = strict_json.loads(header.metadata[METADATA_KEY])
        version = values["format"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"'{path}' is damaged: its vitrail document cannot be read") from None
    if type(version) is not int or version < 1:
        raise UserError(f"'{path}' is damaged: {reprlib.repr(version)} is not a format number")
    if version > FORMAT:
        raise UserError(
            f"'{path}' has format {version}, and this vitrail ({vitrail.__version__}) reads up to {FORMAT}: "
            "upgrade with pip install --upgrade vitrail"
        )
    if version == 1 and "checksums" not in values:
        return validate(Card, values, f"'{path}'"), None
    try:
        sums = Checksums.model_validate(values.pop("checksums", None))
    except ValidationError:
        raise UserError(f"'{path}' is damaged: its checksums are missing or cannot be read") from None
    if not header_matches(header.metadata[METADATA_KEY], header.kinds, sums):
        raise _damaged(path, "header")
    return validate(Card, values, f"'{path}'"), sums


def _damaged(path: str | Path, part: str) -> UserError:
    return UserError(f"'{path}' is damaged: its {part} does not match its checksum; get the file again")


def read_bundle(path: str | Path) -> tuple[Card, dict[str, Tensor]]:
    """The card and the weights, in float32, checked against the network the card describes and their checksum."""
    header = read_header(path)
    card, sums = _document(header, path)
    stored = new_names(name for name in header.shapes if name != TRAINED_ON)
    shapes = {name: header.shapes[old] for name, old in stored.items()}
    check_tensors(shapes, card.model, f"'{path}'")
    if sums is None:
        warnings.warn(
            f"'{path}' is of an older format without a checksum, so damage to it cannot be seen; `vitrail convert "
            "OLD NEW.safetensors --to vitrail` writes a file that has one",
            Note,
            stacklevel=2,
        )
    tensors = load_float_tensors(path, header, set(stored.values()))
    if sums is not None and tensors_checksum(tensors) != sums.weights:
        raise _damaged(path, "tensors")
    return card, {name: tensors[old].float() for name, old in stored.items()}


def read_trained_on(path: str | Path) -> np.ndarray:
    """The digests of the images that weights, and those that they came from, were trained on, (n,) uint64 in order;
    none where a file does not tell, or tells in its header, as those of the first format do."""
    header = read_header(path)
    sums = _document(header, path)[1]
    if TRAINED_ON not in header.shapes:
        return np.empty(0, np.uint64)
    if header.dtypes[TRAINED_ON] != "U8" or header.shapes[TRAINED_ON][1:] != (DIGEST,):
        raise UserError(f"'{path}' is damaged: its tensor '{TRAINED_ON}' is not of digests")
    found = load_tensors(path, {TRAINED_ON})
    if sums is not None and tensors_checksum(found) != sums.trained_on:
        raise _damaged(path, f"tensor '{TRAINED_ON}'")
    return found[TRAINED_ON].numpy().view(">u8")[:, 0].astype(np.uint64)


def digest_tensor(digests: np.ndarray) -> Tensor:
    """Digests as the tensor TRAINED_ON holds them: each once, in order, eight bytes each with the highest first."""
    import torch

    rows = np.unique(digests.astype(np.uint64)).astype(">u8")[:, None]
    return torch.from_numpy(rows.view(np.uint8).reshape(-1, DIGEST))


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    config: NetworkConfig,
    where: str,
    called: Callable[[str], str] = str,
) -> None:
    """Names and shapes must be those of the network: otherwise one sentence says which tensor is wrong.

    `called`: what the file would call the tensor of ours that it lacks.
    """
    import torch

    from vitrail.models.build import build_model
    from vitrail.models.flops import count_parameters

    blocks = count_blocks(config)
    if blocks > len(shapes):  # said before building: a network of a million blocks takes minutes even as shapes
        raise UserError(f"{where}: {len(shapes)} tensors are too few for a network of {blocks} blocks")
    held, needed = sum(math.prod(shape) for shape in shapes.values()), count_parameters(config)
    if needed > FAR_MORE * held:
        raise UserError(f"{where}: it holds {held:,} numbers, and the network it describes has {needed:,}")
    with torch.device("meta"):
        network = build_model(config)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    for name, shape in expected.items():
        if name not in shapes:
            raise UserError(f"{where}: tensor '{called(name)}' is missing")
        if shapes[name] != shape:
            raise UserError(f"{where}: tensor '{name}' has shape {shapes[name]}, and the network needs {shape}")
    for name in shapes:
        if name not in expected:
            raise UserError(f"{where}: tensor '{name}' is not part of the network it describes")


def count_blocks(config: NetworkConfig) -> int:
    if isinstance(config, ResNetConfig):
        return sum(config.blocks)
    return config.blocks + sum(config.stem.blocks if config.stem else ())


def write_bundle(path: str | Path, state: Mapping[str, Tensor], card: Card) -> None:
    """Write weights and card whole or not at all; the same input gives the same bytes. The card says how numbers are
    stored: in half precision where they come so. Among the weights may be TRAINED_ON, as `digest_tensor` makes it."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    weights = {name: tensor for name, tensor in tensors.items() if name != TRAINED_ON}
    check_tensors({name: tuple(tensor.shape) for name, tensor in weights.items()}, card.model, f"'{path}'")
    half = all(tensor.dtype == torch.float16 for tensor in weights.values())
    card = card.model_copy(update={"stored": "float16" if half else "float32", "format": FORMAT})
    kinds = {name: (DTYPE_NAMES[str(tensor.dtype)], tuple(tensor.shape)) for name, tensor in tensors.items()}
    seen = {name: tensors[name] for name in tensors.keys() - weights.keys()}
    sums = Checksums(weights=tensors_checksum(weights), trained_on=tensors_checksum(seen) if seen else "")
    try:
        with atomic_write(path) as temporary:
            save_file(tensors, temporary, metadata={METADATA_KEY: with_checksums(_json(card), kinds, sums)})
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot write '{path}': {error}") from error


def _json(card: Card) -> str:
    return card.model_dump_json(by_alias=True)


def replace_card(path: str | Path, card: Card) -> None:
    """Give a weights file another card; its tensors stay as they are, to the byte."""
    path = Path(path).resolve()  # through a link, what it leads to
    header = read_header(path)
    sums = _document(header, path)[1]
    if sums is None:
        seen = header.shapes.keys() & {TRAINED_ON}
        checksum = {
            name: tensors_checksum(load_tensors(path, names)) if names else ""
            for name, names in (("weights", header.shapes.keys() - seen), ("trained_on", seen))
        }
        sums = Checksums(**checksum)
    document = with_checksums(_json(card.model_copy(update={"format": FORMAT})), header.kinds, sums)
    replace_metadata(path, {METADATA_KEY: document})
