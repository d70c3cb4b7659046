"""Networks to benchmark: a model name, optionally followed by a space and changes ("S/16 reg4+layerscale")."""

from __future__ import annotations

from typing import Any, Literal

from vitrail.config import ModelConfig, NetworkConfig, ResNetConfig, StemConfig
from vitrail.errors import UserError
from vitrail.models.variants import config_from_name

# As in the models of timm: DINOv2's registers have no position embedding.
CHANGES: dict[str, dict[str, Any]] = {
    "gap": {"pool": "gap"},
    "map": {"pool": "map"},
    "reg4": {"registers": 4, "prefix_positions": False},
    "layerscale": {"layer_scale": 1e-5},
}
# timm supports no other constants in its convolutional networks, so all libraries use these.
TIMM_CONSTANTS: dict[str, Any] = {"norm_eps": 1e-5, "weight_eps": 1e-8, "weight_eps_in": "variance"}


def variant(name: str, classes: int, image_size: int, gelu: Literal["erf", "tanh"]) -> NetworkConfig:
    base, _, changes = name.partition(" ")
    options: dict[str, Any] = {}
    for change in filter(None, changes.split("+")):
        if change not in CHANGES:
            raise UserError(f"model {name}: unknown change '{change}'; available: {', '.join(CHANGES)}")
        options |= CHANGES[change]
    config = config_from_name(base, classes, image_size, **options)
    if isinstance(config, ResNetConfig):
        return config.model_copy(update=TIMM_CONSTANTS)
    return config.model_copy(update={"gelu": gelu, "stem": timm_stem(config)})


def timm_stem(config: ModelConfig) -> StemConfig | None:
    return config.stem and config.stem.model_copy(update=TIMM_CONSTANTS)
