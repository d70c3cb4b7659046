"""Model names, such as "B/16", "R50+B/16" or "R50x1": parsed with one table of sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vitrail.config import NetworkConfig, Size, merge, network_config
from vitrail.errors import UserError, check_integer, did_you_mean

# size: (width, depth, mlp_dim, heads). B, L, H: the paper's Table 1; g, G: Scaling Vision Transformers.
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
# layers of a ResNet: blocks per stage
RESNETS: dict[str, tuple[int, ...]] = {
    "26": (2, 2, 2, 2),
    "50": (3, 4, 6, 3),
    "101": (3, 4, 23, 3),
    "152": (3, 8, 36, 3),
    "200": (3, 24, 36, 3),
}
PLAIN = ["Ti/16", "S/32", "S/16", "M/16", "B/32", "B/16", "B/8", "L/32", "L/16", "H/14", "g/14", "G/14"]
HYBRIDS = ["R+Ti/16", "R26+S/32", "R26+B/32", "R50+B/32", "R50+B/16", "R50+L/32", "R50+L/16"]
BIT = ["R50x1", "R50x2", "R50x3", "R101x1", "R101x3", "R152x1", "R152x2", "R152x4", "R200x3"]
AXIAL = ["Axial-B/32", "Axial-B/16"]
MODEL_NAMES = [*PLAIN, *HYBRIDS, *BIT, *AXIAL]  # of the paper and its code, in display order

TRANSFORMER = re.compile(r"(?P<axial>Axial-)?(?P<stem>R(?P<layers>\d*)(?:x1)?\+)?(?P<letter>[A-Za-z]+)/(?P<patch>\d+)")
RESNET = re.compile(r"R(?P<layers>\d+)x(?P<factor>[1-9]\d?)")


def config_from_name(name: str, num_classes: int, image_size: int | Size = 224, **options: Any) -> NetworkConfig:
    """The config of a named network: `config_from_name("S/16", 10, (224, 320), pool="gap")`."""
    if not isinstance(name, str):
        raise UserError(f"name must be a string, such as 'S/16', not {type(name).__name__}")
    check_integer("num_classes", num_classes, "the number of classes", least=0)
    values = {**parse_name(name), "image_size": parse_image_size(image_size), "num_classes": int(num_classes)}
    if "stem" in options and "stem" not in values:
        raise UserError(f"stem has no effect on {name}, which has no convolutional stem; use a hybrid such as R50+B/16")
    if options.get("pool") in ("gap", "map") and "kind" not in values:
        values.setdefault("class_token", False)  # as in the original code
    return network_config(merge(values, options), f"model {name}")


def parse_image_size(image_size: int | Sequence[int]) -> Size:
    """(height, width) from one number or a pair."""
    is_pair = isinstance(image_size, Sequence) and not isinstance(image_size, str)
    sides: list[Any] = [*image_size] if is_pair else [image_size] * 2  # type: ignore[misc]
    if len(sides) != 2:
        raise UserError(f"image_size must be a number of pixels or (height, width), not {image_size!r}")
    for side in sides:
        check_integer("image_size", side, "an integer or (height, width)")
    return int(sides[0]), int(sides[1])


def parse_name(name: str) -> dict[str, Any]:
    """The values of a ModelConfig or ResNetConfig that a model name stands for."""
    plain = re.sub(r"^BiT-(?=R\d)|ViT-", "", name.strip())
    if (match := RESNET.fullmatch(plain)) and match["layers"] in RESNETS:
        return {"kind": "resnet", "blocks": RESNETS[match["layers"]], "width": 64 * int(match["factor"])}
    match = TRANSFORMER.fullmatch(plain)
    if not match or match["letter"] not in SIZES or int(match["patch"]) < 1:
        raise _unknown(name, plain)
    width, depth, mlp_dim, heads = SIZES[match["letter"]]
    values: dict[str, Any] = {"width": width, "depth": depth, "mlp_dim": mlp_dim, "heads": heads}
    if match["stem"]:
        blocks, patch = _stem(match["layers"], int(match["patch"]), name, plain)
        values |= {"stem": {"blocks": blocks}}
    else:
        patch = int(match["patch"])
    if match["axial"]:
        values |= {"axial": True, "class_token": False, "pool": "gap"}
    return {**values, "patch": (patch, patch)}


def _stem(layers: str, total: int, name: str, plain: str) -> tuple[tuple[int, ...], int]:
    """Blocks per stage of a hybrid's stem, and the patch size on its feature map, for tokens of `total` pixels.

    For 16 pixels, the blocks of the last stage move to the stage before it. "R+Ti/16" of the original code is an
    exception: its stem has only the root, and patches of 8 make tokens of 32 pixels.
    """
    if not layers and total == 16:
        return (), 8
    if layers not in RESNETS or total not in (16, 32):
        raise _unknown(name, plain)
    *early, third, fourth = RESNETS[layers]
    return ((*early, third, fourth) if total == 32 else (*early, third + fourth)), 1


def _unknown(name: str, plain: str) -> UserError:
    same = [known for known in MODEL_NAMES if known.lower() == plain.lower()]
    letter = re.fullmatch(r"([A-Za-z]+)/(\d+)", plain)
    if letter and letter[1] == "b" and plain != name.strip():  # the paper's ViT-b: B with all widths halved
        hint = f"; the paper's ViT-b is 'S/{letter[2]}' here, its ViT-B 'B/{letter[2]}'."
    elif same:
        hint = f"; did you mean '{same[0]}'?"
    elif letter and letter[1].capitalize() in SIZES and letter[1] not in SIZES:
        hint = f"; did you mean '{letter[1].capitalize()}/{letter[2]}'?"
    else:
        hint = did_you_mean(name, MODEL_NAMES) or "."
    sizes = ", ".join(SIZES)
    return UserError(
        f"unknown model '{name}'{hint} A model name is a size ({sizes}), a slash and a patch size, such as S/16; "
        "`vitrail models` also lists hybrids (R50+B/16), ResNets (R50x1) and axial networks (Axial-B/16)."
    )
