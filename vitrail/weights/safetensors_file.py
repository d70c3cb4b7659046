"""Reading safetensors files: the header, which is checked before any tensor is read, and the tensors.

Importing this does not import torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from vitrail import strict_json
from vitrail.atomic import atomic_write
from vitrail.errors import UserError, error_reason

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER = 32_000_000  # bytes; room for a million class names. Parsing takes about ten times the memory
MAX_TENSORS = 100_000
MAX_DIMS = 8  # of a tensor
MAX_JSON_VALUES = 2_000_000  # in a header
FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}  # supported dtypes of weights -> bytes per number


class Header(NamedTuple):
    """Metadata, shapes and dtypes of a safetensors file."""

    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    @property
    def dtypes_and_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (self.dtypes[name], shape) for name, shape in self.shapes.items()}


class _Tensor(BaseModel):
    """The header entry of a tensor."""

    model_config = ConfigDict(extra="forbid")

    dtype: str = Field(strict=True)
    shape: tuple[StrictInt, ...] = Field(max_length=MAX_DIMS)
    data_offsets: tuple[StrictInt, StrictInt]


def check_regular_file(path: str | Path) -> None:
    """Raise UserError for pipes, sockets and devices, which would block or never end."""
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"'{path}' is a pipe, a socket or a device, not a file")


def read_header(path: str | Path) -> Header:
    """Read the header and check it against the length of the file, which detects truncated files."""
    metadata, tensors, start, size = _parse(path)
    end = 0
    for name, about in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        first, last = about.data_offsets
        if first != end or last < first:
            raise UserError(f"'{path}' is damaged: its tensors overlap or leave a gap at '{name}'; get the file again")
        length_fits = about.dtype not in FLOATS or math.prod(about.shape) * FLOATS[about.dtype] == last - first
        if not length_fits or min(about.shape, default=0) < 0:
            raise UserError(
                f"'{path}' is damaged: tensor '{name}' does not have the length of its shape; get the file again"
            )
        end = last
    if start + end != size:
        raise UserError(
            f"'{path}' is damaged: it has {size:,} bytes and should have {start + end:,}; get the file again"
        )
    shapes = {name: about.shape for name, about in tensors.items()}
    return Header(metadata, shapes, {name: about.dtype for name, about in tensors.items()})


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of the header, even of a file that is truncated after it."""
    return _parse(path)[0]


def _parse(path: str | Path) -> tuple[dict[str, str], dict[str, _Tensor], int, int]:
    """Return metadata, tensor entries, the offset of the first tensor and the length of the file."""
    try:
        check_regular_file(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not size:
                raise UserError(f"'{path}' is empty")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                long = f" (a header of {length:,} bytes)" if length > MAX_HEADER else ""
                raise UserError(f"'{path}' is not a safetensors file, or it is truncated{long}; get the file again")
            text = file.read(length)
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error_reason(error)}") from None
    except ValueError as error:  # an invalid file name, as in the index of a sharded file
        raise UserError(f"cannot read a file called {str(path)!r}: {error}") from None
    if sum(map(text.count, (b"{", b"[", b","))) > MAX_JSON_VALUES:  # checked before parsing, which takes memory
        raise UserError(f"'{path}' has a header with more than {MAX_JSON_VALUES:,} values, too many for a weights file")
    try:
        values: Any = strict_json.loads(text)
    except ValueError:
        raise UserError(f"'{path}' is not a safetensors file: its header is not JSON") from None
    if isinstance(values, dict) and len(values) > MAX_TENSORS:
        raise UserError(f"'{path}' has {len(values):,} tensors; at most {MAX_TENSORS:,} are read")
    try:
        metadata = values.pop("__metadata__", {})
        tensors = {name: _Tensor.model_validate(about) for name, about in values.items()}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata is text")
    except (AttributeError, TypeError, ValueError):  # pydantic's is a ValueError
        raise UserError(f"'{path}' is not a safetensors file: its header does not describe tensors") from None
    return metadata, tensors, 8 + length, size


def load_float_tensors(path: str | Path, header: Header, names: Collection[str]) -> dict[str, Tensor]:
    """Read tensors in their stored precision; raises UserError unless they are floats."""
    unsupported = sorted({header.dtypes[name] for name in names} - FLOATS.keys())
    if unsupported:
        raise UserError(f"'{path}' has {unsupported[0]} tensors; weights must be {', '.join(sorted(FLOATS))}")
    return load_tensors(path, names)


def load_tensors(path: str | Path, names: Collection[str]) -> dict[str, Tensor]:
    """Read tensors by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in sorted(names)}
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read '{path}': {error}") from None


def replace_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Replace the metadata of a file; the bytes of its tensors do not change."""
    try:
        # The file is opened inside `atomic_write`, so it is closed before it is replaced: Windows needs that.
        with atomic_write(path) as temporary, open(path, "rb") as file, temporary.open("wb") as new:
            values = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            values["__metadata__"] = metadata
            text = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # safetensors aligns tensors to eight bytes
            new.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(file, new, 1 << 24)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error_reason(error)}") from error
