"""Where weights come from and what they take, as rows of a report: read from their card, and from nothing else."""

from __future__ import annotations

from vitrail.config import ModelConfig, NetworkConfig, Preprocess, ResNetConfig
from vitrail.weights.bundle import Card


def provenance(card: Card) -> list[tuple[str, str]]:
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
            "terms of the starting weights" if card.source else "terms",
            card.licence or "none stated" * bool(card.source),
        ),
        ("answers", _answers(card)),
        ("stored in", "half precision (float16)" if card.stored == "float16" else ""),
        ("made with", card.created_with),
    ]
    return [(name, value) for name, value in rows if value]


def network_line(model: NetworkConfig) -> str:
    if isinstance(model, ResNetConfig):
        stages = "-".join(map(str, model.blocks))
        return f"ResNet (BiT) with stages of {stages} blocks, {model.width} channels wide at the root"
    return (
        f"{vit_kind(model)}, {model.blocks} blocks of {model.heads} heads, {model.width} wide, "
        f"patches of {_by(model.cell)} px"
    )


def vit_kind(model: ModelConfig) -> str:
    return "hybrid" if model.stem else "axial Vision Transformer" if model.axial else "Vision Transformer"


def preprocessing_line(spec: Preprocess) -> str:
    """All there is to it, for whoever makes pixels elsewhere."""
    size, filtered = _by(spec.size), spec.interpolation + ("" if spec.antialias else " without antialiasing")
    if spec.resize == "squash":
        how = f"resized to {size} px whatever the shape ({filtered})"
    else:
        kept = f", which is {spec.crop_fraction:.1%} of the resized one" if spec.crop_fraction < 1 else ""
        how = f"resized with the shape kept ({filtered}), the centre cropped to {size} px{kept}"
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (spec.mean, spec.std))
    return f"{how}; pixels from 0 to 1 less a mean of {mean}, divided by {std}"


def _answers(card: Card) -> str:
    """How logits become answers, where that was tuned."""
    tuned = card.postprocess
    told = [f"temperature {tuned.temperature:.3g}"] if tuned.temperature != 1 else []
    told += [f"none of these below a probability of {tuned.threshold:.3g}"] if tuned.threshold else []
    told += ["a threshold of its own for every label"] if tuned.thresholds else []
    return ", ".join(told)


def _by(size: tuple[int, int]) -> str:
    return "x".join(map(str, size))
