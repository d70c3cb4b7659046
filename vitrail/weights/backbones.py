"""Pre-trained networks that runs start from when nobody names one: plain, free, and at home in most pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vitrail.models.flops import count_parameters
from vitrail.weights.bundle import read_card
from vitrail.weights.hub import is_cached
from vitrail.weights.names import BUNDLED, HUB_PREFIX, bundled_file

HUB_TIMEOUT = 3.0  # seconds for the Hub to answer whether it has a model


@dataclass(frozen=True)
class Backbone:
    spec: str
    network: str
    parameters: float  # millions, without the head
    megabytes: int  # to fetch, or of the package; with the head
    licence: str
    learned: str  # from
    measured: str = ""  # here, on what

    @property
    def repository(self) -> str:
        """Of the Hub."""
        return self.spec.removeprefix(HUB_PREFIX)


_AUGREG = "ImageNet-21k, 14 million images (AugReg, Steiner et al. 2021)"
TINY = Backbone("hf-hub:timm/vit_tiny_patch16_224.augreg_in21k", "Ti/16", 5.5, 39, "apache-2.0", _AUGREG)
SMALL = Backbone("hf-hub:timm/vit_small_patch16_224.augreg_in21k", "S/16", 21.7, 120, "apache-2.0", _AUGREG)
BASE = Backbone("hf-hub:timm/vit_base_patch16_224.augreg_in21k", "B/16", 85.8, 410, "apache-2.0", _AUGREG)
BACKBONES = (TINY, SMALL, BASE)


def bundled() -> Backbone:
    """The network of the package, by what its card says."""
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
    """Why a backbone cannot be had here, in a few words; empty if it lies in the local cache or the Hub offers it, and
    before the latter `fetching` is called."""
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
    except Exception:  # whatever keeps the Hub from answering, the run goes on without it
        return f"{backbone.repository} is not in the local cache, and the Hub does not answer"
    fetching()
    return ""
