"""vitrail's weights file: a safetensors file whose header carries one JSON document, the card.

Importing this does not import torch, so commands can read a card quickly.
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

FORMAT = 3  # since 2: checksums; since 3: timm's tensor names for Vision Transformers
METADATA_KEY = "vitrail"  # the only metadata key: safetensors writes several keys in no fixed order
TRAINED_ON = "vitrail.trained_on"  # tensor with the digests of the training images; not a parameter
DIGEST = 8  # bytes of a digest
MAX_EXCESS = 100  # a network with this many times the parameters of the file is not built even on the meta device
DTYPE_NAMES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float64": "F64"}
DTYPE_NAMES |= {"torch.uint8": "U8"}

Digests = Annotated[list[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]], FailFast()]


def _task(value: object) -> object:
    """The name of the task. Older files store a bool: whether images are multilabel."""
    return {False: "classification", True: "multilabel"}[value] if isinstance(value, bool) else value


class _Known(BaseModel):
    """The keys of an open section of the card that commands read; others are allowed."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Data(_Known):
    name: str = ""
    fingerprint: str = ""
    images: dict[str, int] = Field(default_factory=dict)
    given_split: bool = False
    holdout_fraction: float = 0
    val_fraction: float = 0
    split_seed: int = 0
    group_similar: bool = False
    max_pixels: int = Field(default=1, gt=0)
    trained_on: Digests = []  # only in files before format 2: the smallest digests
    trained_before: Annotated[list[Digests], FailFast()] = []  # likewise, for the weights that training started from


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


def _with_steps(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    if not all("step" in row for row in rows):
        raise ValueError("a row has no 'step'")
    return rows


class Card(Schema):
    """The metadata of a weights file: network, preprocessing, classes, and where the weights came from."""

    model_config = ConfigDict(populate_by_name=True)

    format: int = FORMAT
    model: NetworkConfig
    preprocess: Preprocess
    classes: Annotated[tuple[str, ...], FailFast()] = ()  # in logit order; empty if the weights have no class names
    # What the logits mean: a key of `vitrail.tasks.table.TASKS`
    task: Annotated[str, BeforeValidator(_task)] = Field(
        "classification", validation_alias=AliasChoices("task", "several")
    )
    postprocess: Postprocess = Field(default=Postprocess(), validation_alias=AliasChoices("postprocess", "answering"))
    recipe: Annotated[dict[str, Any], BeforeValidator(current_settings), _like(_Recipe)] = Field(
        default_factory=dict
    )  # the resolved run config
    data: Annotated[dict[str, Any], BeforeValidator(_current_data), _like(_Data)] = Field(
        default_factory=dict
    )  # name, fingerprint, counts, split rule
    metrics: dict[str, Any] = Field(default_factory=dict)
    curves: Annotated[list[dict[str, float]], AfterValidator(_with_steps)] = Field(default_factory=list)  # downsampled
    source: str = ""  # of the starting weights
    licence: str = ""  # of the data and of the starting weights
    stored: Literal["float32", "float16"] = "float32"  # dtype in the file; computation is in float32
    created_with: str = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Card:
        if self.classes and len(self.classes) != self.model.num_classes:
            raise ValueError(f"{len(self.classes)} class names for {self.model.num_classes} logits")
        if self.postprocess.thresholds and len(self.postprocess.thresholds) != self.model.num_classes:
            raise ValueError(f"{len(self.postprocess.thresholds)} thresholds for {self.model.num_classes} logits")
        if self.preprocess.size != self.model.image_size:
            output, taken = ("x".join(map(str, size)) for size in (self.preprocess.size, self.model.image_size))
            raise ValueError(f"preprocessing makes {output} images, and the network takes {taken}")
        if self.preprocess.channels != self.model.channels:
            raise ValueError(
                f"preprocessing for {self.preprocess.channels} channels, network for {self.model.channels}"
            )
        return self


def created_with() -> str:
    """The versions of vitrail and torch, such as `vitrail 0.1.0, torch 2.13.0`."""
    return f"vitrail {vitrail.__version__}, torch {metadata.version('torch').partition('+')[0]}"


def read_card(path: str | Path) -> Card:
    """Read the card of a vitrail weights file without reading the weights."""
    return _document(read_header(path), path)[0]


def _document(header: Header, path: str | Path) -> tuple[Card, Checksums | None]:
    """The card and the checksums, which files of format 1 may lack."""
    if METADATA_KEY not in header.metadata:
        raise UserError(
            f"'{path}' was not written by vitrail: its header has no vitrail document; convert it with "
            "vitrail convert --to vitrail"
        )
    try:
        values = strict_json.loads(header.metadata[METADATA_KEY])
        version = values["format"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"'{path}' is damaged: its vitrail document is not valid JSON; get the file again") from None
    if type(version) is not int or version < 1:
        raise UserError(f"'{path}' is damaged: its format version is {reprlib.repr(version)}; get the file again")
    if version > FORMAT:
        raise UserError(
            f"'{path}' has format {version}, and vitrail {vitrail.__version__} reads up to format {FORMAT}: "
            "run pip install --upgrade vitrail"
        )
    if version == 1 and "checksums" not in values:
        return validate(Card, values, f"'{path}'"), None
    try:
        sums = Checksums.model_validate(values.pop("checksums", None))
    except ValidationError:
        raise UserError(f"'{path}' is damaged: its checksums are missing or invalid; get the file again") from None
    if not header_matches(header.metadata[METADATA_KEY], header.dtypes_and_shapes, sums):
        raise _damaged(path, "header")
    return validate(Card, values, f"'{path}'"), sums


def _damaged(path: str | Path, part: str) -> UserError:
    return UserError(f"'{path}' is damaged: its {part} does not match its checksum; get the file again")


def read_bundle(path: str | Path) -> tuple[Card, dict[str, Tensor]]:
    """Read card and state dict (float32); names, shapes and checksum are verified."""
    header = read_header(path)
    card, sums = _document(header, path)
    stored = new_names(name for name in header.shapes if name != TRAINED_ON)
    shapes = {name: header.shapes[old] for name, old in stored.items()}
    check_tensors(shapes, card.model, f"'{path}'")
    if sums is None:
        warnings.warn(
            f"'{path}' has an older format without checksums, so damage cannot be detected; `vitrail convert "
            "OLD NEW.safetensors --to vitrail` adds them",
            Note,
            stacklevel=2,
        )
    tensors = load_float_tensors(path, header, set(stored.values()))
    if sums is not None and tensors_checksum(tensors) != sums.weights:
        raise _damaged(path, "tensors")
    return card, {name: tensors[old].float() for name, old in stored.items()}


def read_trained_on(path: str | Path) -> np.ndarray:
    """Read the sorted digests, (n,) uint64, of all images that the weights and their starting weights were trained on.

    Empty if the file does not store them, or stores them in its header (format 1).
    """
    header = read_header(path)
    sums = _document(header, path)[1]
    if TRAINED_ON not in header.shapes:
        return np.empty(0, np.uint64)
    if header.dtypes[TRAINED_ON] != "U8" or header.shapes[TRAINED_ON][1:] != (DIGEST,):
        raise UserError(
            f"'{path}' is damaged: its tensor '{TRAINED_ON}' must be uint8 of shape (n, {DIGEST}); get the file again"
        )
    tensors = load_tensors(path, {TRAINED_ON})
    if sums is not None and tensors_checksum(tensors) != sums.trained_on:
        raise _damaged(path, f"tensor '{TRAINED_ON}'")
    return tensors[TRAINED_ON].numpy().view(">u8")[:, 0].astype(np.uint64)


def digest_tensor(digests: np.ndarray) -> Tensor:
    """The tensor TRAINED_ON: unique sorted digests, (n, 8) big-endian bytes."""
    import torch

    rows = np.unique(digests.astype(np.uint64)).astype(">u8")[:, None]
    return torch.from_numpy(rows.view(np.uint8).reshape(-1, DIGEST))


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    config: NetworkConfig,
    where: str,
    name_in_file: Callable[[str], str] = str,
) -> None:
    """Raise UserError, naming the tensor, unless names and shapes are those of the network.

    `name_in_file` maps the name of a missing tensor to the name it would have in the file.
    """
    import torch

    from vitrail.models.build import build_model
    from vitrail.models.flops import count_parameters

    blocks = count_blocks(config)
    if blocks > len(shapes):  # checked first: building a million blocks takes minutes even on the meta device
        raise UserError(f"{where} has {len(shapes)} tensors, too few for a network of {blocks} blocks")
    stored, needed = sum(math.prod(shape) for shape in shapes.values()), count_parameters(config)
    if needed > MAX_EXCESS * stored:
        raise UserError(f"{where} has {stored:,} parameters, and the network it describes has {needed:,}")
    with torch.device("meta"):
        network = build_model(config)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    for name, shape in expected.items():
        if name not in shapes:
            raise UserError(f"{where}: tensor '{name_in_file(name)}' is missing")
        if shapes[name] != shape:
            raise UserError(f"{where}: tensor '{name}' has shape {shapes[name]}, and the network needs {shape}")
    for name in shapes:
        if name not in expected:
            raise UserError(f"{where}: tensor '{name}' does not belong to the network it describes")


def count_blocks(config: NetworkConfig) -> int:
    """Number of blocks, those of a hybrid's stem included."""
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
    entries = {name: (DTYPE_NAMES[str(tensor.dtype)], tuple(tensor.shape)) for name, tensor in tensors.items()}
    digests = {name: tensors[name] for name in tensors.keys() - weights.keys()}
    sums = Checksums(weights=tensors_checksum(weights), trained_on=tensors_checksum(digests) if digests else "")
    try:
        with atomic_write(path) as temporary:
            save_file(tensors, temporary, metadata={METADATA_KEY: with_checksums(_json(card), entries, sums)})
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot write '{path}': {error}") from error


def _json(card: Card) -> str:
    return card.model_dump_json(by_alias=True)


def replace_card(path: str | Path, card: Card) -> None:
    """Replace the card of a weights file; the bytes of its tensors do not change."""
    path = Path(path).resolve()  # the target of a link, not the link
    header = read_header(path)
    sums = _document(header, path)[1]
    if sums is None:
        digests = header.shapes.keys() & {TRAINED_ON}
        checksum = {
            name: tensors_checksum(load_tensors(path, names)) if names else ""
            for name, names in (("weights", header.shapes.keys() - digests), ("trained_on", digests))
        }
        sums = Checksums(**checksum)
    document = with_checksums(_json(card.model_copy(update={"format": FORMAT})), header.dtypes_and_shapes, sums)
    replace_metadata(path, {METADATA_KEY: document})
