"""The other libraries' own networks, to run beside ours where they are installed."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.config import ModelConfig, NetworkConfig
from vitrail.models.build import build_with
from vitrail.weights import to_huggingface, to_timm
from vitrail.weights.bundle import Card
from vitrail.weights.foreign import read_json

Run = Callable[[Tensor], Tensor]  # pixels -> logits, or features where there are no classes


class NoPeer(Exception):
    """Why the other library's network cannot be run here."""


class Unloadable(NoPeer):
    """The library is there, and does not take the weights."""


def ours(card: Card, state: Mapping[str, Tensor]) -> Run:
    return build_with(card.model, state).eval()


def timm_folder(folder: Path, tensors: Mapping[str, Tensor] | None = None, config: NetworkConfig | None = None) -> Run:
    """timm's network from a folder with its config.json; with these tensors, or those timm finds there itself. Its
    images are of the size in `config`, of which the folder may not tell."""
    options: dict[str, Any] = {"img_size": config.image_size} if isinstance(config, ModelConfig) else {}
    if not (folder / "config.json").is_file():
        raise NoPeer("timm builds no network without its config.json")
    name = read_json(folder / "config.json").get("architecture")
    timm = _import("timm")
    if not isinstance(name, str) or not timm.is_model(name):
        told = isinstance(name, str)
        raise NoPeer(f"timm has no architecture '{name}'" if told else "its config.json names no architecture")
    place = f"local-dir:{folder}"
    with _loading(f"timm's {name}"):
        if tensors is not None:
            with torch.device("meta"):  # what config.json asks for may be larger than any machine
                _check_fits(timm.create_model(place, pretrained=False, **options), tensors)
        model: nn.Module = timm.create_model(place, pretrained=tensors is None, **options)
        if tensors is not None:
            model.load_state_dict(tensors)
    return _guarded("timm", model.float().eval())


def _check_fits(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in network.state_dict().items():
        if name not in tensors:
            raise ValueError(f"its network has a tensor '{name}', and they do not")
        if tensor.shape != tensors[name].shape:
            shapes = tuple(tensor.shape), tuple(tensors[name].shape)
            raise ValueError(f"tensor '{name}' has shape {shapes[0]} in its network, and {shapes[1]} in them")


def timm_npz(file: Path, card: Card) -> Run:
    """What timm's own reader of Google's files makes of one, in the network of timm that is closest to ours."""
    model = card.model
    reason = to_timm.cannot(card)
    if isinstance(model, ModelConfig) and model.positions != "1d":
        reason = "has no table of positions, without which timm reads no file"
    if not isinstance(model, ModelConfig) and model.pool_padding != "zeros":
        reason = "is in big_vision's names, and of BiT timm reads Google's first files alone"
    if reason:
        raise NoPeer(f"this network {reason}")
    name, args = to_timm.architecture(model)
    timm = _import("timm")
    with _loading("timm"):
        network: nn.Module = timm.create_model(name, **args)
        network.load_pretrained(str(file))  # type: ignore[operator]
    return _guarded("timm", network.float().eval())


def transformers_folder(folder: Path, card: Card, tensors: Mapping[str, Tensor] | None = None) -> Run:
    """transformers' network from a folder, with these tensors or those it finds there itself; its output is what ours
    gives."""
    model = card.model
    transformers = _import("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # A ViT without classifier and representation layer would have one invented for it.
    plain = isinstance(model, ModelConfig) and to_huggingface.kind_of(model) == "vit" and not model.representation
    options: dict[str, Any] = {"add_pooling_layer": False} if plain and not model.num_classes else {}
    with _loading("transformers"):
        kind = transformers.AutoModelForImageClassification if model.num_classes else transformers.AutoModel
        place: str | None = str(folder)
        if tensors is not None:
            config = transformers.AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                kind = type(kind.from_config(config))  # which takes tensors, as the one that chooses it does not
            place, options = None, {**options, "config": config, "state_dict": dict(tensors)}
        network = kind.from_pretrained(
            place, local_files_only=True, trust_remote_code=False, dtype=torch.float32, **options
        )
        network = network.float().eval()

    def run(pixels: Tensor) -> Tensor:
        output = network(pixels)
        if model.num_classes:
            return output.logits
        if not isinstance(model, ModelConfig):
            return output.pooler_output.flatten(1)
        return output.pooler_output if model.representation else output.last_hidden_state[:, 0]

    return _guarded("transformers", run)


def _guarded(library: str, run: Run) -> Run:
    def guarded(pixels: Tensor) -> Tensor:
        with _loading(library, "run"):
            return run(pixels)

    return guarded


@contextmanager
def _loading(library: str, verb: str = "load") -> Iterator[None]:
    try:
        yield
    except ImportError as error:  # some of a library's own imports come late
        raise NoPeer(f"{library} cannot be imported: {_first_line(error)}") from None
    except Exception as error:  # config.json can make them fail in any way
        raise Unloadable(f"{library} does not {verb} these weights: {_first_line(error)}") from None


def _import(name: str) -> ModuleType:
    """A library that need not be there; one that is there and cannot be imported is as good as missing."""
    logging.getLogger(name).setLevel(logging.ERROR)
    let_torchvision_import()
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        raise NoPeer(
            f"{name} {'is not installed' if missing else f'cannot be imported: {_first_line(error)}'}"
        ) from None


_operators: list[torch.library.Library] = []  # which live as long as this


def let_torchvision_import() -> None:
    """timm and transformers import torchvision, whose compiled part does not load beside a CPU-only torch: it then
    stops at an operator that it cannot find, and takes both libraries with it. No network here calls its operators,
    so to declare the two that it looks for is enough."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError):
        return  # not there, or broken in a way of its own, of which the importing library will speak
    except RuntimeError as error:
        if _operators or "torchvision::nms" not in str(error):
            return
        library = torch.library.Library("torchvision", "FRAGMENT")  # others may declare operators there, too
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.append(library)


def _first_line(error: Exception) -> str:
    """What it says first that says something: no colours of a terminal, no heading, no empty line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not line.endswith(":")]
    return (telling or lines or [type(error).__name__])[0]
