"""What weights are called: a path, a model of the Hub, or `bundled`. Nothing heavy is imported."""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import UserError, user_path

HUB_PREFIX = "hf-hub:"
BUNDLED = "bundled"  # a name, wherever one is: a file or folder called so is ./bundled
BUNDLED_FILE = Path(__file__).parent / "bundled" / "ti8-tiny-imagenet.safetensors"


def weights_spec(weights: str | Path) -> str:
    """As text; a Path is never a name, even where it is spelled like one."""
    return f"./{weights}" if weights == Path(BUNDLED) else str(weights)


def local_path(weights: str | Path) -> Path | None:
    """The path that is meant; none for weights that go by a name."""
    spec = weights_spec(weights)
    return None if spec == BUNDLED or spec.startswith(HUB_PREFIX) else user_path(spec)


def absolute_spec(spec: str) -> str:
    """What means the same from any folder."""
    path = local_path(spec) if spec else None
    return str(path.absolute()) if path is not None and path.exists() else spec


def bundled_file() -> Path:
    """The pre-trained network that comes with the package."""
    if not BUNDLED_FILE.is_file():
        raise UserError(f"this installation lacks the bundled weights ({BUNDLED_FILE.name}): install vitrail again")
    return BUNDLED_FILE
