"""Provenance of weights as rows of a report, read from their card."""

from __future__ import annotations

from vitrail.config import ModelConfig, NetworkConfig, Preprocess, ResNetConfig
from vitrail.weights.bundle import Card


def provenance(card: Card) -> list[tuple[str, str]]:
    """Return (property, value) of everything that the card states."""
    data = card.data
    images = f"{data['images']['train']:,} images of " if "train" in data.get("images", {}) else ""
    trained = f"{images}{data['name']}" if "name" in data else "unknown"
    rows = [
        ("network", network_line(card.model)),
        ("preprocessing", preprocessing_line(card.preprocess)),
        ("trained on", trained),
        ("data fingerprint", str(data.get("fingerprint", ""))),
        ("recipe", str(card.recipe.get("recipe") or "")),
        ("starting weights", card.source or "none (random)"),
        (
            "licence of the starting weights" if card.source else "licence",
            card.licence or "not stated" * bool(card.source),
        ),
        ("postprocessing", _postprocessing_line(card)),
        ("weights dtype", "float16" if card.stored == "float16" else ""),
        ("created with", card.created_with),
    ]
    return [(name, value) for name, value in rows if value]


def network_line(model: NetworkConfig) -> str:
    """Describe a network in one line."""
    if isinstance(model, ResNetConfig):
        stages = "-".join(map(str, model.blocks))
        return f"ResNet (BiT), blocks {stages}, root width {model.width}"
    return (
        f"{vit_kind(model)}, depth {model.blocks}, width {model.width}, {model.heads} heads, "
        f"patch size {_format_size(model.cell)} px"
    )


def vit_kind(model: ModelConfig) -> str:
    """Return the kind of Vision Transformer, in words."""
    return "hybrid" if model.stem else "axial Vision Transformer" if model.axial else "Vision Transformer"


def preprocessing_line(spec: Preprocess) -> str:
    """Describe the preprocessing completely, for use with other software."""
    size, filtered = _format_size(spec.size), spec.interpolation + ("" if spec.antialias else " without antialiasing")
    if spec.resize == "squash":
        how = f"resized to {size} px, aspect ratio not kept ({filtered})"
    else:
        kept = f" ({spec.crop_fraction:.1%} of the resized image)" if spec.crop_fraction < 1 else ""
        how = f"resized, aspect ratio kept ({filtered}), then centre-cropped to {size} px{kept}"
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (spec.mean, spec.std))
    return f"{how}; pixels scaled to 0..1, then normalised with mean {mean} and std {std}"


def _postprocessing_line(card: Card) -> str:
    """Describe how predictions are made from logits, if that was tuned."""
    tuned = card.postprocess
    parts = [f"temperature {tuned.temperature:.3g}"] if tuned.temperature != 1 else []
    parts += [f'"none of these" below a probability of {tuned.threshold:.3g}'] if tuned.threshold else []
    parts += ["one threshold per label"] if tuned.thresholds else []
    return ", ".join(parts)


def _format_size(size: tuple[int, int]) -> str:
    return "x".join(map(str, size))
