"""Checksums of a weights file. They detect damage, not forgery: whoever changes a file can recompute them.

The vitrail document stores three: of the network's tensors, of the digests of training images, and of the header (the
document with the other two checksums, and the name, dtype and shape of every tensor). A command verifies only what it
reads. Importing this does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 22  # bytes hashed by one thread
BITS = 128
HEX = rf"^[0-9a-f]{{{BITS // 4}}}$"
DtypesAndShapes = Mapping[str, tuple[str, Sequence[int]]]  # by tensor name


class Checksums(BaseModel):
    """The checksums in the vitrail document of a file, as hexadecimal digits."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    weights: str = Field(pattern=HEX)
    trained_on: str = Field(default="", pattern=rf"{HEX}|^$")
    header: str = Field(default="", pattern=rf"{HEX}|^$")


def tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Checksum of the bytes of all tensors, in the order of their names; hashed on all cores."""
    chunks = (chunk for name in sorted(tensors) for chunk in _chunks(tensors[name]))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return _blake(b"".join(pool.map(lambda chunk: _blake(chunk).digest(), chunks))).hexdigest()


def with_checksums(document: str, tensors: DtypesAndShapes, sums: Checksums) -> str:
    """Add the checksums to a JSON document, as its last key."""
    bare = f'{document.removesuffix("}")},"checksums":{sums.model_copy(update={"header": ""}).model_dump_json()}}}'
    ending = '"header":""}}'
    assert bare.endswith(ending)
    return f'{bare.removesuffix(ending)}"header":"{_header_checksum(bare, tensors)}"}}}}'


def header_matches(document: str, tensors: DtypesAndShapes, sums: Checksums) -> bool:
    """Whether the header checksum is that of the document and the tensor entries."""
    return bool(sums.header) and _header_checksum(document.replace(f'"{sums.header}"', '""'), tensors) == sums.header


def _header_checksum(bare: str, tensors: DtypesAndShapes) -> str:
    table = json.dumps([[name, dtype, list(shape)] for name, (dtype, shape) in sorted(tensors.items())])
    return _blake(f"{table}\n{bare}".encode()).hexdigest()


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    import torch

    flat: memoryview = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    yield from (flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK))


def _blake(data: bytes | memoryview) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=BITS // 8)
