"""Our one artifact, `model.safetensors`: the weights, and one JSON document in the header that says what they are.

Importing this does not import torch, so that a command can read a card at once.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, model_validator

import vitrail
from vitrail.atomic import whole_file
from vitrail.config import NetworkConfig, Preprocess, ResNetConfig, Schema, validate
from vitrail.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
KEY = "vitrail"  # the only metadata key: safetensors writes several keys in no fixed order
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format itself
MAX_TENSORS = 100_000
FAR_MORE = 100  # times what a file holds: a network that large is not even built as shapes
DTYPES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}  # kinds of numbers that weights are; their bytes


class Answering(Schema):
    """How logits become answers: what was found after training, and is no weight."""

    temperature: float = Field(default=1.0, gt=0)  # logits are divided by it
    threshold: float = Field(default=0.0, ge=0, le=1)  # of one label: below this probability, none of these
    thresholds: tuple[float, ...] = ()  # of any number of labels: one each; empty: a half
    measured_on: str = ""
    fitted_on: str = ""  # tells the very images it was found with, whatever their names


class Card(Schema):
    """What a weights file says about itself: enough to use the weights rightly and to trace where they came from."""

    format: int = FORMAT
    model: NetworkConfig
    preprocess: Preprocess
    classes: tuple[str, ...] = ()  # in the order of the logits; empty: the weights came without names
    several: bool = False  # an image can have any number of the classes: each logit stands for itself
    answering: Answering = Answering()
    recipe: dict[str, Any] = Field(default_factory=dict)  # the resolved run config
    data: dict[str, Any] = Field(default_factory=dict)  # fingerprint, name, counts, split rule
    metrics: dict[str, Any] = Field(default_factory=dict)
    curves: list[dict[str, float]] = Field(default_factory=list)  # of its training, in few points
    source: str = ""  # where the starting weights came from
    licence: str = ""  # of the data and of the starting weights
    stored: Literal["float32", "float16"] = "float32"  # the numbers in the file; they are computed with in float32
    created_with: str = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Card:
        if self.classes and len(self.classes) != self.model.num_classes:
            raise ValueError(f"{len(self.classes)} class names for {self.model.num_classes} logits")
        if self.answering.thresholds and len(self.answering.thresholds) != self.model.num_classes:
            raise ValueError(f"{len(self.answering.thresholds)} thresholds for {self.model.num_classes} logits")
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


class Header(NamedTuple):
    """The start of any safetensors file."""

    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]


def check_regular(path: str | Path) -> None:
    """A pipe or a device would be waited for, or read without end."""
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"'{path}' is not a file with contents of its own, but a pipe, a socket or a device")


def read_header(path: str | Path) -> Header:
    """The header of a safetensors file, read without its tensors; a file cut short is found here."""
    try:
        check_regular(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not size:
                raise UserError(f"'{path}' is empty")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise UserError(f"'{path}' is not a safetensors file, or it was cut short")
            values = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"'{path}' is not a safetensors file: its header is not JSON") from None
    if isinstance(values, dict) and len(values) > MAX_TENSORS:
        raise UserError(f"'{path}' has {len(values):,} tensors, and no network has more than {MAX_TENSORS:,}")
    try:
        told = {str(key): str(value) for key, value in values.pop("__metadata__", {}).items()}
        shapes = {name: tuple(int(n) for n in about["shape"]) for name, about in values.items()}
        dtypes = {name: str(about["dtype"]) for name, about in values.items()}
        spans = {name: tuple(int(place) for place in about["data_offsets"]) for name, about in values.items()}
        end = max((span[1] for span in spans.values()), default=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise UserError(f"'{path}' is not a safetensors file: its header does not describe tensors") from None
    if 8 + length + end != size:
        raise UserError(f"'{path}' is damaged: {size:,} bytes where its header promises {8 + length + end:,}")
    for name, shape in shapes.items():
        if dtypes[name] in DTYPES and math.prod(shape) * DTYPES[dtypes[name]] != spans[name][1] - spans[name][0]:
            raise UserError(f"'{path}' is damaged: tensor '{name}' does not have the length that its shape needs")
    return Header(told, shapes, dtypes)


def read_card(path: str | Path) -> Card:
    """What a vitrail weights file says about itself, without reading the weights."""
    return _card(read_header(path), path)


def _card(header: Header, path: str | Path) -> Card:
    if KEY not in header.metadata:
        raise UserError(f"'{path}' was not written by vitrail: its header has no vitrail document")
    try:
        values = json.loads(header.metadata[KEY])
        version = values["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"'{path}' is damaged: its vitrail document cannot be read") from None
    if not isinstance(version, int) or version < 1:
        raise UserError(f"'{path}' is damaged: '{version}' is not a format number")
    if version > FORMAT:
        raise UserError(
            f"'{path}' has format {version}, and this vitrail ({vitrail.__version__}) reads up to {FORMAT}: "
            "upgrade with pip install --upgrade vitrail"
        )
    return validate(Card, values, f"'{path}'")


def read_bundle(path: str | Path) -> tuple[Card, dict[str, Tensor]]:
    """The card and the weights, in float32, checked against the network the card describes."""
    header = read_header(path)
    card = _card(header, path)
    check_tensors(header.shapes, card.model, f"'{path}'")
    return card, load_float32(path)


def load_float32(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file in float32; files may hold half precision, and nothing but floats."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    strange = sorted(set(read_header(path).dtypes.values()) - DTYPES.keys())
    if strange:
        raise UserError(f"'{path}' holds {strange[0]} numbers, and weights are {', '.join(sorted(DTYPES))}")
    try:
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read '{path}': {error}") from None


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

    from vitrail.model.build import build
    from vitrail.model.cost import parameters

    blocks = count_blocks(config)
    if blocks > len(shapes):  # said before building: a network of a million blocks takes minutes even as shapes
        raise UserError(f"{where}: {len(shapes)} tensors are too few for a network of {blocks} blocks")
    held, needed = sum(math.prod(shape) for shape in shapes.values()), parameters(config)
    if needed > FAR_MORE * held:
        raise UserError(f"{where}: it holds {held:,} numbers, and the network it describes has {needed:,}")
    with torch.device("meta"):
        network = build(config)
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
    stored: in half precision where they come so."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    check_tensors({name: tuple(tensor.shape) for name, tensor in state.items()}, card.model, f"'{path}'")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    half = all(tensor.dtype == torch.float16 for tensor in tensors.values())
    card = card.model_copy(update={"stored": "float16" if half else "float32"})
    try:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, metadata={KEY: card.model_dump_json()})
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot write '{path}': {error}") from error


def replace_card(path: str | Path, card: Card) -> None:
    """Give a weights file another card; its tensors stay as they are, to the byte."""
    read_card(path)  # that it is one of ours, and whole
    try:
        with open(path, "rb") as file, whole_file(Path(path)) as temporary, temporary.open("wb") as new:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            header["__metadata__"] = {KEY: card.model_dump_json()}
            text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
            new.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(file, new, 1 << 24)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror or error}") from error
