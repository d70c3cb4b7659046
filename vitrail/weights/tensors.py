"""The tensors of a file and what stands beside it: no contents are read before the network is known to fit."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vitrail import strict_json
from vitrail.errors import UserError, error_reason
from vitrail.weights.safetensors_file import FLOATS, MAX_TENSORS, check_regular_file, load_float_tensors, read_header

MAX_SIDE_FILE = 32_000_000  # bytes; a config.json with the names of 20,000 classes has one
NUMPY = {"f4": "F32", "f2": "F16", "f8": "F64", "V2": "BF16"}  # numpy has no name for bfloat16
# Weights hardly compress. An archive that unpacks to more than this many times its size is no weights file.
MOST_COMPRESSED, ALWAYS_FINE = 20, 100_000_000
# What training code puts before every name: wrappers of torch, and attributes that hold the network.
WRAPPERS = ("module.", "_orig_mod.", "model.", "net.", "backbone.", "teacher.")


@dataclass(frozen=True)
class TensorSource:
    where: str  # what messages call it
    folder: Path  # where it lies
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    fetch: Callable[[Collection[str]], dict[str, Tensor]]  # the contents of these, by the names in the file
    stored: Mapping[str, str]  # name to the name in the file
    note: str = ""  # which of the file's weights these are, where it holds several

    def named(self, names: Mapping[str, str]) -> TensorSource:
        """Only these, under other names: new name to present name."""
        return replace(
            self,
            shapes={new: self.shapes[old] for new, old in names.items()},
            dtypes={new: self.dtypes[old] for new, old in names.items()},
            stored={new: self.stored[old] for new, old in names.items()},
        )

    def without_prefix(self, *prefixes: str) -> TensorSource:
        """Names with the first of these prefixes that they begin with taken off."""
        found = {name: next((p for p in prefixes if name.startswith(p)), "") for name in self.shapes}
        return self.named({name.removeprefix(prefix): name for name, prefix in found.items()})

    def beside(self, name: str) -> dict[str, Any] | None:
        """A JSON file of that name in the same folder."""
        path = self.folder / name
        return read_json(path) if path.exists() else None

    def called(self, name: str) -> str:
        """What the file would call a tensor that it lacks: with the prefix of the one whose name is closest."""

        def alike(other: str) -> int:
            return sum(1 for _ in takewhile(bool, map(str.__eq__, name, other)))

        near = max(self.stored, key=alike, default="")
        stored = self.stored.get(near, "")
        return (stored.removesuffix(near) if stored.endswith(near) else "") + name

    def blank(self) -> dict[str, Tensor]:
        """Tensors of the right shapes without contents, to try a translation on."""
        try:
            return {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        except (RuntimeError, TypeError, OverflowError, ValueError):
            raise UserError(f"{self.where} tells of a tensor larger than any can be") from None

    def check_floats(self) -> None:
        strange = sorted(set(self.dtypes.values()) - FLOATS.keys())
        if strange:
            raise UserError(f"{self.where} holds {strange[0]} numbers, and weights are floats of 16, 32 or 64 bits")

    def load(self) -> dict[str, Tensor]:
        """The contents, in float32."""
        found = self.fetch(set(self.stored.values()))
        return {name: found[stored] for name, stored in self.stored.items()}


def read_json(path: Path) -> dict[str, Any]:
    try:
        check_regular_file(path)
        if path.stat().st_size > MAX_SIDE_FILE:
            raise UserError(f"'{path}' has {path.stat().st_size:,} bytes, far more than a file beside weights needs")
        values = strict_json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error_reason(error)}") from None
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"'{path}' is not a JSON document with keys")
    return values


def make_source(
    where: str,
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    fetch: Callable[[Collection[str]], dict[str, Tensor]],
    note: str = "",
) -> TensorSource:
    if len(shapes) > MAX_TENSORS:
        raise UserError(f"{where} has {len(shapes):,} tensors, and no network has more than {MAX_TENSORS:,}")
    tensors = TensorSource(where, folder, shapes, dtypes, fetch, {name: name for name in shapes}, note)
    while prefix := next((p for p in WRAPPERS if shapes and all(name.startswith(p) for name in tensors.shapes)), ""):
        tensors = tensors.named({name.removeprefix(prefix): name for name in tensors.shapes})
    return tensors


def safetensors_source(files: Sequence[Path], where: str) -> TensorSource:
    """A safetensors file, or the shards of one."""
    headers = {file: read_header(file) for file in files}
    shapes = {name: shape for header in headers.values() for name, shape in header.shapes.items()}
    dtypes = {name: dtype for header in headers.values() for name, dtype in header.dtypes.items()}

    def fetch(names: Collection[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for file, header in headers.items():
            found |= load_float_tensors(file, header, header.shapes.keys() & names)
        return {name: tensor.float() for name, tensor in found.items()}

    return make_source(where, files[0].parent, shapes, dtypes, fetch)


def npz_source(file: Path, where: str) -> TensorSource:
    """numpy's archive of arrays. Arrays of objects, which are pickles, are refused."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            unpacked = sum(member.file_size for member in members)
            if unpacked > max(ALWAYS_FINE, MOST_COMPRESSED * file.stat().st_size):
                raise UserError(f"{where} would unpack to {unpacked:,} bytes, far more than weights of its size do")
            if len(members) > MAX_TENSORS:
                raise UserError(f"{where} has {len(members):,} arrays, and no network has more than {MAX_TENSORS:,}")
            for member in members:
                with archive.open(member) as stream:
                    shape, dtype = _array_header(stream, member.file_size)
                shapes[member.filename.removesuffix(".npy")] = shape
                dtypes[member.filename.removesuffix(".npy")] = dtype
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"cannot read {where}: {error}") from None

    def fetch(names: Collection[str]) -> dict[str, Tensor]:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return {name: _float32(arrays[name]) for name in names}
        except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise UserError(f"cannot read {where}: {error}") from None

    return make_source(where, file.parent, shapes, dtypes, fetch)


def _array_header(stream: IO[bytes], size: int) -> tuple[tuple[int, ...], str]:
    """Shape and kind of numbers of an array, whose length must be what they say."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of numpy's format")
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which is a pickle")
    count = 1
    for length in shape:
        count *= length
    if stream.tell() + count * dtype.itemsize != size:
        raise ValueError("an array whose length is not what its header says")
    return tuple(shape), NUMPY.get(dtype.str[1:], str(dtype))  # in either order of bytes


def _float32(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind == "V":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, which conversion looks for
        return torch.from_numpy(array.astype(np.float32, copy=False))
