"""Networks of timm and transformers, if installed, to compare vitrail's outputs with."""

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

Run = Callable[[Tensor], Tensor]  # pixels -> logits, or features without a classifier


class Reference(NamedTuple):
    """A network of another library. Its outputs must equal vitrail's unless `expected_difference` says why not."""

    library: str
    run: Run
    expected_difference: str = ""


class ReferenceUnavailable(Exception):
    """The other library's network cannot be run here; the message says why."""


class LoadFailure(ReferenceUnavailable):
    """The library is installed and fails to load the weights."""


@contextmanager
def loading(library: str, verb: str = "load") -> Iterator[None]:
    """Turn errors of another library into ReferenceUnavailable and LoadFailure."""
    try:
        yield
    except ImportError as error:  # libraries import some of their parts late
        raise ReferenceUnavailable(f"{library} cannot be imported: {_first_line(error)}") from None
    except Exception as error:  # a config.json can make them raise anything
        raise LoadFailure(f"{library} cannot {verb} these weights: {_first_line(error)}") from None


def import_library(name: str) -> ModuleType:
    """Import an optional library; raises ReferenceUnavailable if it is missing or its import fails."""
    logging.getLogger(name).setLevel(logging.ERROR)
    make_torchvision_importable()
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        raise ReferenceUnavailable(
            f"{name} {'is not installed' if missing else f'cannot be imported: {_first_line(error)}'}"
        ) from None


_operators: list[torch.library.Library] = []  # kept alive: definitions end with their Library


def make_torchvision_importable() -> None:
    """Declare the operators without which torchvision, and so timm and transformers, cannot be imported.

    torchvision's compiled part does not load next to a CPU-only torch, and its import then fails at a missing operator.
    No network here calls these operators.
    """
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError):
        return  # missing or broken otherwise: importing timm or transformers will report it
    except RuntimeError as error:
        if _operators or "torchvision::nms" not in str(error):
            return
        library = torch.library.Library("torchvision", "FRAGMENT")  # FRAGMENT: others may declare operators there too
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.append(library)


def _first_line(error: Exception) -> str:
    """The first informative line of a message, without terminal colors, headings and empty lines."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    informative = [line for line in lines if not line.endswith(":")]
    return (informative or lines or [type(error).__name__])[0]
