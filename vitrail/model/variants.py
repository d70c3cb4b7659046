"""One table of sizes. "B/16" is parsed, never one function per variant."""

from __future__ import annotations

import re
from typing import Any

from vitrail.config import ModelConfig, Size, validate
from vitrail.errors import UserError, did_you_mean

# letter: (width, depth, mlp_dim, heads). B, L, H: the paper's Table 1; g, G: Scaling Vision Transformers.
SIZES: dict[str, tuple[int, int, int, int]] = {
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}
COMMON = ["Ti/16", "S/32", "S/16", "M/16", "B/32", "B/16", "B/8", "L/32", "L/16", "H/14", "g/14", "G/14"]


def configure(name: str, num_classes: int, image_size: int | Size = 224, **options: Any) -> ModelConfig:
    """The config of a named network: `configure("S/16", 10, (224, 320), pool="gap")`."""
    letter, patch = parse(name)
    width, depth, mlp_dim, heads = SIZES[letter]
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if options.get("pool") == "gap":
        options.setdefault("class_token", False)  # as in the original code
    values = {"width": width, "depth": depth, "mlp_dim": mlp_dim, "heads": heads, "patch": (patch, patch)}
    return validate(ModelConfig, {**values, "image_size": size, "num_classes": num_classes, **options}, f"model {name}")


def parse(name: str) -> tuple[str, int]:
    """`"B/16"` -> `("B", 16)`."""
    match = re.fullmatch(r"(?:ViT-)?([A-Za-z]+)/(\d+)", name.strip())
    if match and match[1] in SIZES and int(match[2]) > 0:
        return match[1], int(match[2])
    if match and match[1].capitalize() in SIZES and match[1] not in SIZES:
        hint = f"; did you mean '{match[1].capitalize()}/{match[2]}'?"
    else:
        hint = did_you_mean(name, COMMON) or "."
    sizes = ", ".join(SIZES)
    raise UserError(f"no model '{name}'{hint} A model is a size ({sizes}), a slash and a patch size, such as S/16.")
