"""Files of torch.save, opened with weights_only: they can hold tensors and plain containers, and run no code."""

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
# Keys under which training code stores the weights, in order of preference: EMA and teacher weights first.
STATE_DICT_KEYS = (
    "state_dict_ema",
    "model_ema",
    "ema",
    "teacher",
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "module",
)
MAX_NESTING = 5  # a dict can contain itself
FORBIDDEN_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def pickle_source(file: Path, where: str) -> TensorSource:
    """The tensors of the state dict in a file of torch.save."""
    values, note = _find_state_dict(_load(file, where), where)
    tensors = {str(name): value for name, value in values.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        _check_stored(name, tensor, where)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: TORCH.get(tensor.dtype, str(tensor.dtype)) for name, tensor in tensors.items()}

    def fetch(names: Collection[str]) -> dict[str, Tensor]:
        return {name: tensors[name].detach().float().clone() for name in names}

    return make_source(where, file.parent, shapes, dtypes, fetch, note)


def _load(file: Path, where: str) -> Any:
    try:
        with open(file, "rb") as stream, warnings.catch_warnings(action="ignore"):
            mapped = (
                zipfile.is_zipfile(stream) and file.suffix != ".safetensors"
            )  # torch chooses by the suffix of a path
            stream.seek(0)
            return torch.load(file if mapped else stream, weights_only=True, map_location="cpu", mmap=mapped)
    except OSError as error:
        raise UserError(f"cannot read {where}: {error_reason(error)}") from None
    except Exception as error:  # the unpickler raises many types on damaged or hostile files
        if forbidden := FORBIDDEN_GLOBAL.search(str(error)):
            raise UserError(
                f"{where} was not opened: it would run '{forbidden[1]}'; save its state_dict() as .safetensors"
            ) from None
        raise UserError(
            f"{where} was not opened: it is damaged, or holds other objects than tensors, which could run code"
        ) from None


def _find_state_dict(values: Any, where: str) -> tuple[dict[Any, Any], str]:
    """The innermost dict with tensors, and a note which one it is if the file has several."""
    note = ""
    for _ in range(MAX_NESTING):
        if not isinstance(values, dict):
            break
        if any(isinstance(value, Tensor) for value in values.values()):
            others = [key for key, value in values.items() if not isinstance(value, Tensor | int | float | str | None)]
            if others:
                raise UserError(
                    f"{where} has no plain state dict: '{others[0]}' is not a tensor. Save state_dict() alone"
                )
            return values, note
        keys = [key for key in STATE_DICT_KEYS if isinstance(values.get(key), dict)]
        if not keys:
            break
        if len(keys) > 1:
            ignored = ", ".join(f"'{key}'" for key in keys[1:])
            note = f"the weights under '{keys[0]}', not those under {ignored}"
        values = values[keys[0]]
    raise UserError(
        f"{where} has no state dict (a dict of names and tensors); save one with torch.save(net.state_dict(), FILE)"
    )


def _check_stored(name: str, tensor: Tensor, where: str) -> None:
    """Raise unless the tensor is dense and fully stored: a file can claim a large tensor by repeating one number."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UserError(f"{where}: tensor '{name}' is sparse, quantized or empty; only dense tensors are read")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UserError(f"{where}: tensor '{name}' is damaged: it has {tensor.numel():,} numbers, and fewer are stored")
