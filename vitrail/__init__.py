"""vitrail: Vision Transformers for image classification.

The public API is eight functions: create, load, train, fit, evaluate, predict, embed and explain. docs/python.md has an
example of each. Each is imported on first use, so `import vitrail` imports neither torch nor numpy.
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
else:  # not for type checkers, which would accept any name
    _MODULES = {
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
        if name not in _MODULES:
            raise AttributeError(f"module 'vitrail' has no attribute '{name}'")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
