"""Lazy access to the tensors of a weights file and to the JSON files next to it.

Names, shapes and dtypes come first; contents are read only after the network is known to fit.
"""

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

MAX_JSON_FILE = 32_000_000  # bytes; a config.json with the names of 20,000 classes has one million
NUMPY = {"f4": "F32", "f2": "F16", "f8": "F64", "V2": "BF16"}  # numpy has no name for bfloat16
# Weights hardly compress: an archive that unpacks to more than 20 times its size (and 100 MB) is rejected.
MAX_COMPRESSION, ALWAYS_ALLOWED = 20, 100_000_000
# Prefixes that wrappers of torch and training code put before every name; they are removed.
WRAPPERS = ("module.", "_orig_mod.", "model.", "net.", "backbone.", "teacher.")


@dataclass(frozen=True)
class TensorSource:
    """Tensors of a file by name, not yet read."""

    where: str  # name in error messages
    folder: Path  # of the file
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    fetch: Callable[[Collection[str]], dict[str, Tensor]]  # reads these tensors, by their names in the file
    stored: Mapping[str, str]  # name -> name in the file
    note: str = ""  # which state dict of the file this is, if it has several

    def renamed(self, names: Mapping[str, str]) -> TensorSource:
        """Keep only these tensors, under new names: new name -> current name."""
        return replace(
            self,
            shapes={new: self.shapes[old] for new, old in names.items()},
            dtypes={new: self.dtypes[old] for new, old in names.items()},
            stored={new: self.stored[old] for new, old in names.items()},
        )

    def without_prefix(self, *prefixes: str) -> TensorSource:
        """Remove the first matching prefix from each name."""
        removed = {name: next((p for p in prefixes if name.startswith(p)), "") for name in self.shapes}
        return self.renamed({name.removeprefix(prefix): name for name, prefix in removed.items()})

    def sibling_json(self, name: str) -> dict[str, Any] | None:
        """The JSON file of this name in the same folder, or None."""
        path = self.folder / name
        return read_json(path) if path.exists() else None

    def name_in_file(self, name: str) -> str:
        """The name a missing tensor would have in the file: with the prefix of the most similar name there."""

        def common_prefix(other: str) -> int:
            return sum(1 for _ in takewhile(bool, map(str.__eq__, name, other)))

        nearest = max(self.stored, key=common_prefix, default="")
        stored = self.stored.get(nearest, "")
        return (stored.removesuffix(nearest) if stored.endswith(nearest) else "") + name

    def meta_tensors(self) -> dict[str, Tensor]:
        """Meta tensors of the same shapes, to try a key mapping on."""
        try:
            return {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        except (RuntimeError, TypeError, OverflowError, ValueError):
            raise UserError(f"{self.where} is damaged: a tensor in its header is larger than torch allows") from None

    def check_floats(self) -> None:
        """Raise UserError if a tensor has another dtype than 16, 32 or 64 bit floats."""
        unsupported = sorted(set(self.dtypes.values()) - FLOATS.keys())
        if unsupported:
            raise UserError(f"{self.where} has {unsupported[0]} tensors; weights must be floats of 16, 32 or 64 bits")

    def load(self) -> dict[str, Tensor]:
        """Read all tensors, as float32."""
        tensors = self.fetch(set(self.stored.values()))
        return {name: tensors[stored] for name, stored in self.stored.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    try:
        check_regular_file(path)
        if path.stat().st_size > MAX_JSON_FILE:
            raise UserError(f"'{path}' has {path.stat().st_size:,} bytes; JSON files are read up to {MAX_JSON_FILE:,}")
        values = strict_json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error_reason(error)}") from None
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"'{path}' is not valid JSON, or not a JSON object")
    return values


def make_source(
    where: str,
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    fetch: Callable[[Collection[str]], dict[str, Tensor]],
    note: str = "",
) -> TensorSource:
    """A source without the prefixes of wrappers such as DistributedDataParallel."""
    if len(shapes) > MAX_TENSORS:
        raise UserError(f"{where} has {len(shapes):,} tensors; at most {MAX_TENSORS:,} are read")
    tensors = TensorSource(where, folder, shapes, dtypes, fetch, {name: name for name in shapes}, note)
    while prefix := next((p for p in WRAPPERS if shapes and all(name.startswith(p) for name in tensors.shapes)), ""):
        tensors = tensors.renamed({name.removeprefix(prefix): name for name in tensors.shapes})
    return tensors


def safetensors_source(files: Sequence[Path], where: str) -> TensorSource:
    """The tensors of a safetensors file, or of its shards."""
    headers = {file: read_header(file) for file in files}
    shapes = {name: shape for header in headers.values() for name, shape in header.shapes.items()}
    dtypes = {name: dtype for header in headers.values() for name, dtype in header.dtypes.items()}

    def fetch(names: Collection[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file, header in headers.items():
            tensors |= load_float_tensors(file, header, header.shapes.keys() & names)
        return {name: tensor.float() for name, tensor in tensors.items()}

    return make_source(where, files[0].parent, shapes, dtypes, fetch)


def npz_source(file: Path, where: str) -> TensorSource:
    """The arrays of a NumPy .npz file. Object arrays, which are pickles, are rejected."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            unpacked = sum(member.file_size for member in members)
            if unpacked > max(ALWAYS_ALLOWED, MAX_COMPRESSION * file.stat().st_size):
                raise UserError(
                    f"{where} would unpack to {unpacked:,} bytes, too many for weights: it is not a weights file"
                )
            if len(members) > MAX_TENSORS:
                raise UserError(f"{where} has {len(members):,} arrays; at most {MAX_TENSORS:,} are read")
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
    """Shape and dtype of a .npy member; raises ValueError if its length does not match them."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"unsupported version {version} of NumPy's file format")
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it holds an array of Python objects, which is a pickle")
    count = 1
    for length in shape:
        count *= length
    if stream.tell() + count * dtype.itemsize != size:
        raise ValueError("it is damaged: the length of an array does not match its header")
    return tuple(shape), NUMPY.get(dtype.str[1:], str(dtype))  # of either byte order


def _float32(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind == "V":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
    with np.errstate(over="ignore"):  # overflow becomes inf, which `Weights` rejects
        return torch.from_numpy(array.astype(np.float32, copy=False))
