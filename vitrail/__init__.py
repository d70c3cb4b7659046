"""vitrail: Vision Transformers as software people rely on.

The whole public API is eight functions; docs/python.md has an example of each. Importing this imports neither torch nor
numpy: a function is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["create", "embed", "evaluate", "explain", "fit", "load", "predict", "train"]

if TYPE_CHECKING:
    from vitrail.commands.evaluate import evaluate
    from vitrail.commands.explain import explain
    from vitrail.commands.predict import embed, predict
    from vitrail.inference.classifier import load
    from vitrail.models.build import create
    from vitrail.workflows.fit import fit
    from vitrail.workflows.train_run import train
else:  # hidden from type checkers, for which every name would exist
    _HOME = {
        "create": "vitrail.models.build",
        "embed": "vitrail.commands.predict",
        "evaluate": "vitrail.commands.evaluate",
        "explain": "vitrail.commands.explain",
        "fit": "vitrail.workflows.fit",
        "load": "vitrail.inference.classifier",
        "predict": "vitrail.commands.predict",
        "train": "vitrail.workflows.train_run",
    }

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'vitrail' has no attribute '{name}'")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
