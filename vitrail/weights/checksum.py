"""Checksums of a weights file, which tell damage (not forgery: whoever changes a file can write them anew).

Three stand in the vitrail document: of the network's tensors, of the digests of training images, and of the header,
which covers the document itself with the other two, and the name, type and shape of every tensor. So a command that
needs a part verifies that part. Importing this does not import torch.
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

CHUNK = 1 << 22  # bytes that one thread hashes at a time
BITS = 128
HEX = rf"^[0-9a-f]{{{BITS // 4}}}$"
Kinds = Mapping[str, tuple[str, Sequence[int]]]  # of every tensor of a file: type and shape


class Checksums(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    weights: str = Field(pattern=HEX)
    trained_on: str = Field(default="", pattern=rf"{HEX}|^$")
    header: str = Field(default="", pattern=rf"{HEX}|^$")


def tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of all their bytes, in the order of their names. Python hashes without its lock, so all cores help."""
    parts = (part for name in sorted(tensors) for part in _parts(tensors[name]))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return _blake(b"".join(pool.map(lambda part: _blake(part).digest(), parts))).hexdigest()


def with_checksums(document: str, kinds: Kinds, sums: Checksums) -> str:
    """A JSON document with its checksums as its last key."""
    bare = f'{document.removesuffix("}")},"checksums":{sums.model_copy(update={"header": ""}).model_dump_json()}}}'
    ending = '"header":""}}'
    assert bare.endswith(ending)
    return f'{bare.removesuffix(ending)}"header":"{_header(bare, kinds)}"}}}}'


def header_matches(document: str, kinds: Kinds, sums: Checksums) -> bool:
    return bool(sums.header) and _header(document.replace(f'"{sums.header}"', '""'), kinds) == sums.header


def _header(bare: str, kinds: Kinds) -> str:
    table = json.dumps([[name, dtype, list(shape)] for name, (dtype, shape) in sorted(kinds.items())])
    return _blake(f"{table}\n{bare}".encode()).hexdigest()


def _parts(tensor: Tensor) -> Iterator[memoryview]:
    import torch

    flat: memoryview = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    yield from (flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK))


def _blake(data: bytes | memoryview) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=BITS // 8)
