"""Weights specs: a path, `hf-hub:owner/name[@revision]` or `bundled`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import UserError, user_path

HUB_PREFIX = "hf-hub:"
BUNDLED = "bundled"  # always the bundled weights; a file or folder of this name is ./bundled
BUNDLED_FILE = Path(__file__).parent / "bundled" / "ti8-tiny-imagenet.safetensors"


def weights_spec(weights: str | Path) -> str:
    """The spec as text. A Path always means a file or folder, so Path("bundled") becomes "./bundled"."""
    return f"./{weights}" if weights == Path(BUNDLED) else str(weights)


def local_path(weights: str | Path) -> Path | None:
    """The path that a spec means, or None for the bundled weights and Hub models."""
    spec = weights_spec(weights)
    return None if spec == BUNDLED or spec.startswith(HUB_PREFIX) else user_path(spec)


def absolute_spec(spec: str) -> str:
    """The spec with an absolute path, so that it is valid from any working directory."""
    path = local_path(spec) if spec else None
    return str(path.absolute()) if path is not None and path.exists() else spec


def bundled_file() -> Path:
    """The path of the pretrained weights in the package."""
    if not BUNDLED_FILE.is_file():
        raise UserError(
            f"the bundled weights ({BUNDLED_FILE.name}) are missing from this installation: reinstall vitrail"
        )
    return BUNDLED_FILE
