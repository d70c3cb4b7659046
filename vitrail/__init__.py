"""vitrail: Vision Transformers as software people rely on. Importing this does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["create", "fit", "load", "train"]

if TYPE_CHECKING:
    from vitrail.inference.classifier import load
    from vitrail.models.build import create
    from vitrail.workflows.fit import fit
    from vitrail.workflows.train_run import train


_HOME = {
    "create": "vitrail.models.build",
    "fit": "vitrail.workflows.fit",
    "load": "vitrail.inference.classifier",
    "train": "vitrail.workflows.train_run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vitrail' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
