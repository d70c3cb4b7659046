"""Files of torch.save, opened so that they can hold tensors and plain containers and nothing that runs."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError, error_reason
from vitrail.weights.tensors import TensorSource, make_source

TORCH = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
# Where training code keeps the weights among other things; averaged ones, and teachers, are what it publishes.
NESTS = ("state_dict_ema", "model_ema", "ema", "teacher", "state_dict", "model_state_dict", "model", "net", "module")
DEEPEST = 5  # nests in nests; a dict that holds itself has no end
WANTED = re.compile(r"GLOBAL ([\w.]+)")


def pickle_source(file: Path, where: str) -> TensorSource:
    values, note = _unwrapped(_opened(file, where), where)
    tensors = {str(name): value for name, value in values.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        _check_stored(name, tensor, where)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: TORCH.get(tensor.dtype, str(tensor.dtype)) for name, tensor in tensors.items()}

    def fetch(names: Collection[str]) -> dict[str, Tensor]:
        return {name: tensors[name].detach().float().clone() for name in names}

    return make_source(where, file.parent, shapes, dtypes, fetch, note)


def _opened(file: Path, where: str) -> Any:
    try:
        with open(file, "rb") as stream, warnings.catch_warnings(action="ignore"):
            mapped = zipfile.is_zipfile(stream) and file.suffix != ".safetensors"  # torch goes by what a path is called
            stream.seek(0)
            return torch.load(file if mapped else stream, weights_only=True, map_location="cpu", mmap=mapped)
    except OSError as error:
        raise UserError(f"cannot read {where}: {error_reason(error)}") from None
    except Exception as error:  # whatever a damaged or hostile pickle makes of the unpickler
        wanted = WANTED.search(str(error))
        if wanted:
            raise UserError(f"{where} wants to run '{wanted[1]}' when opened, so it stays closed") from None
        raise UserError(f"{where} stays closed: it is damaged, or holds more than tensors, which may be code") from None


def _unwrapped(values: Any, where: str) -> tuple[dict[Any, Any], str]:
    """The mapping that holds tensors, and which one it is where the file holds several."""
    note = ""
    for _ in range(DEEPEST):
        if not isinstance(values, dict):
            break
        if any(isinstance(value, Tensor) for value in values.values()):
            strange = [key for key, value in values.items() if not isinstance(value, Tensor | int | float | str | None)]
            if strange:
                raise UserError(f"{where} holds no state dict: beside tensors it has '{strange[0]}', which is none")
            return values, note
        nests = [key for key in NESTS if isinstance(values.get(key), dict)]
        if not nests:
            break
        if len(nests) > 1:
            others = ", ".join(f"'{nest}'" for nest in nests[1:])
            note = f"the weights under '{nests[0]}', and not those under {others}"
        values = values[nests[0]]
    raise UserError(f"{where} holds no state dict: a mapping from names to tensors")


def _check_stored(name: str, tensor: Tensor, where: str) -> None:
    """All its numbers must be in the file: a tensor can also claim a size, and repeat one number."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UserError(f"{where}: tensor '{name}' is sparse, quantised or without contents, and weights are plain")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UserError(f"{where}: tensor '{name}' claims {tensor.numel():,} numbers, and the file holds fewer")
