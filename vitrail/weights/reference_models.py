"""The other libraries' own networks, to run beside ours where they are installed."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

Run = Callable[[Tensor], Tensor]  # pixels -> logits, or features where there are no classes


class Reference(NamedTuple):
    """A network of another library, whose outputs must be those of ours unless `expected_difference` says why not."""

    library: str  # that runs it
    run: Run
    expected_difference: str = ""


class ReferenceUnavailable(Exception):
    """Why the other library's network cannot be run here."""


class LoadFailure(ReferenceUnavailable):
    """The library is there, and does not take the weights."""


@contextmanager
def loading(library: str, verb: str = "load") -> Iterator[None]:
    try:
        yield
    except ImportError as error:  # some of a library's own imports come late
        raise ReferenceUnavailable(f"{library} cannot be imported: {_first_line(error)}") from None
    except Exception as error:  # config.json can make them fail in any way
        raise LoadFailure(f"{library} does not {verb} these weights: {_first_line(error)}") from None


def import_library(name: str) -> ModuleType:
    """A library that need not be there; one that is there and cannot be imported is as good as missing."""
    logging.getLogger(name).setLevel(logging.ERROR)
    make_torchvision_importable()
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        raise ReferenceUnavailable(
            f"{name} {'is not installed' if missing else f'cannot be imported: {_first_line(error)}'}"
        ) from None


_operators: list[torch.library.Library] = []  # which live as long as this


def make_torchvision_importable() -> None:
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
