"""vitrail: Vision Transformers as software people rely on. Importing this does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["create", "load", "train"]

if TYPE_CHECKING:
    from vitrail.infer.predict import load
    from vitrail.model.build import create
    from vitrail.runs.train import train


_HOME = {"create": "vitrail.model.build", "load": "vitrail.infer.predict", "train": "vitrail.runs.train"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vitrail' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
