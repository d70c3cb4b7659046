"""The .npz checkpoints of google-research/vision_transformer, and those of big_vision with the same network."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.config import Preprocess, Size
from vitrail.errors import UserError
from vitrail.weights.foreign import Foreign, Layout, convert

ATTENTION, MLP = "MultiHeadDotProductAttention", "MlpBlock"
LAYOUT = Layout(
    parameters={"tokens.class_token": "cls", "positions.table": "pos_embedding"},
    modules={
        "tokens.projection": "embedding",
        "encoder.norm": "Transformer.encoder_norm",
        "representation.layer": "pre_logits",
        "head": "head",
    },
    block="Transformer.encoderblock_{}.",
    block_modules={
        "norm1": ("LayerNorm_0",),
        "attention.qkv": (f"{ATTENTION}_0.query", f"{ATTENTION}_0.key", f"{ATTENTION}_0.value"),
        "attention.out": (f"{ATTENTION}_0.out",),
        "norm2": ("LayerNorm_1",),
        "mlp.up": (f"{MLP}_0.Dense_0",),
        "mlp.down": (f"{MLP}_0.Dense_1",),
    },
)
PREFIXES = ("opt/target/", "params/")  # where training code keeps the parameters among other things
NUMBERED = re.compile(rf"(.*/encoderblock_\d+)/(LayerNorm|{ATTENTION}|{MLP})_(\d+)(/.*)")
QUERY = f"Transformer/encoderblock_0/{ATTENTION}_0/query/kernel"


def read(path: Path, image_size: Size | None = None) -> Foreign:
    """Weights in flax's names. The file knows no non-square size, no class names and no preprocessing of its own:
    every network of this family takes squashed images with pixels in [-1, 1]."""
    where = f"'{path}'"
    arrays = _load(path)
    if QUERY not in arrays or arrays[QUERY].ndim != 3:
        raise UserError(f"{where} has no Vision Transformer in the layout of google-research/vision_transformer")
    tensors = {_dotted(name): _oriented(name, _tensor(array, where)) for name, array in arrays.items()}
    model, state = convert(
        tensors,
        LAYOUT,
        where,
        [],
        image_size,
        class_row="pos_embedding" not in arrays,  # big_vision adds positions before it puts the class token in front
        heads=arrays[QUERY].shape[1],
        gelu="tanh",
        norm_eps=1e-6,
    )
    half = (0.5,) * model.channels
    return Foreign(model, state, Preprocess(size=model.image_size, antialias=False, mean=half, std=half))


def _load(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The parameters, with the modules of each block numbered from zero by kind."""
    try:
        with np.load(path, allow_pickle=False) as file:
            prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in file.files)), "")
            found = {name.removeprefix(prefix): file[name] for name in file.files if name.startswith(prefix)}
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"cannot read '{path}': {error}") from None
    return _renumber(found)


def _renumber(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Old flax counts all modules of a block together (LayerNorm_2, MlpBlock_3), newer flax counts each kind."""

    def order(names: Iterable[str]) -> dict[tuple[str, str], list[int]]:
        numbers: dict[tuple[str, str], set[int]] = {}
        for match in filter(None, map(NUMBERED.fullmatch, names)):
            numbers.setdefault((match[1], match[2]), set()).add(int(match[3]))
        return {key: sorted(found) for key, found in numbers.items()}

    places = order(arrays)

    def new_name(name: str) -> str:
        match = NUMBERED.fullmatch(name)
        if not match:
            return name
        return f"{match[1]}/{match[2]}_{places[match[1], match[2]].index(int(match[3]))}{match[4]}"

    return {new_name(name): array for name, array in arrays.items()}


def _tensor(array: np.ndarray[Any, Any], where: str) -> Tensor:
    if array.dtype == np.dtype("V2"):  # bfloat16, which numpy has no name for
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
    if array.dtype not in (np.float32, np.float16):
        raise UserError(f"{where} holds {array.dtype} numbers, and weights are float32, float16 or bfloat16")
    return torch.from_numpy(array).float()


def _dotted(name: str) -> str:
    """flax's path with the last word as torch says it; both families' position tables get one name."""
    name = name.removeprefix("Transformer/posembed_input/")
    return re.sub(r"/(kernel|scale)$", "/weight", name).replace("/", ".")


def _oriented(name: str, tensor: Tensor) -> Tensor:
    """flax multiplies from the other side: inputs come first in its kernels, and heads have an axis of their own."""
    if name.endswith(("/query/bias", "/key/bias", "/value/bias")):
        return tensor.flatten()
    if not name.endswith("/kernel"):
        return tensor
    if tensor.ndim == 4:
        return tensor.permute(3, 2, 0, 1).contiguous()  # (h, w, C, D) -> (D, C, h, w)
    if name.endswith("/out/kernel"):
        return tensor.flatten(0, -2).T.contiguous()  # (heads, D/heads, D) -> (D, D)
    return tensor.flatten(1).T.contiguous()  # (D, heads, D/heads) or (in, out) -> (out, in)
