"""The pretrained networks from which `vitrail train` chooses when none is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vitrail.models.flops import count_parameters
from vitrail.weights.bundle import read_card
from vitrail.weights.hub import is_cached
from vitrail.weights.names import BUNDLED, HUB_PREFIX, bundled_file

HUB_TIMEOUT = 3.0  # seconds


@dataclass(frozen=True)
class Backbone:
    """A pretrained network and the facts to choose it by."""

    spec: str
    network: str
    parameters: float  # millions, without the head
    megabytes: int  # of the file, with the head
    licence: str
    pretrained_on: str
    result: str = ""  # measured accuracy, and on which data

    @property
    def repository(self) -> str:
        """The name on the Hub."""
        return self.spec.removeprefix(HUB_PREFIX)


_AUGREG = "ImageNet-21k, 14 million images (AugReg, Steiner et al. 2021)"
TINY = Backbone("hf-hub:timm/vit_tiny_patch16_224.augreg_in21k", "Ti/16", 5.5, 39, "apache-2.0", _AUGREG)
SMALL = Backbone("hf-hub:timm/vit_small_patch16_224.augreg_in21k", "S/16", 21.7, 120, "apache-2.0", _AUGREG)
BASE = Backbone("hf-hub:timm/vit_base_patch16_224.augreg_in21k", "B/16", 85.8, 410, "apache-2.0", _AUGREG)
BACKBONES = (TINY, SMALL, BASE)


def bundled() -> Backbone:
    """The bundled network, described by its card."""
    file = bundled_file()
    card = read_card(file)
    images, name = card.data.get("images", {}).get("train", 0), card.data.get("name", "unknown images")
    top1 = card.metrics.get("top1")
    return Backbone(
        BUNDLED,
        f"{card.recipe.get('model', {}).get('name') or 'ViT'} at {card.model.image_size[0]} px",
        round(count_parameters(card.model.model_copy(update={"num_classes": 0})) / 1e6, 1),
        round(file.stat().st_size / 1e6),
        card.licence or "no licence stated",
        f"{images:,} images of {name}",
        f"top-1 {top1:.1%}. {card.metrics.get('measured_on', '')}".rstrip() if top1 is not None else "",
    )


def unavailable_reason(backbone: Backbone, fetching: Callable[[], None]) -> str:
    """Why a backbone is not available; empty if it is in the local cache or on the Hub.

    `fetching` is called if it has to be downloaded.
    """
    try:
        from huggingface_hub import HfApi, constants
    except ImportError:
        return "the Hugging Face client is not installed (pip install 'vitrail[hub]')"
    if is_cached(backbone.spec):
        return ""
    if constants.HF_HUB_OFFLINE:
        return f"{backbone.repository} is not in the local cache, and HF_HUB_OFFLINE is set"
    try:
        HfApi().model_info(backbone.repository, timeout=HUB_TIMEOUT)
    except Exception:  # training can use the bundled weights instead
        return f"{backbone.repository} is not in the local cache, and the Hub does not respond"
    fetching()
    return ""
