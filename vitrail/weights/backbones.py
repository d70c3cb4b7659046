"""Pre-trained networks that runs start from when nobody names one: plain, free, and at home in most pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vitrail.weights.hub import cached
from vitrail.weights.names import HUB

PATIENCE = 3.0  # seconds for the Hub to answer whether it has a model


@dataclass(frozen=True)
class Backbone:
    repository: str
    network: str
    parameters: float  # millions, without the head
    megabytes: int  # to fetch, with the head of its 21,843 classes
    licence: str
    learned: str

    @property
    def spec(self) -> str:
        return HUB + self.repository


_AUGREG = "ImageNet-21k, 14 million images (AugReg, Steiner et al. 2021)"
TINY = Backbone("timm/vit_tiny_patch16_224.augreg_in21k", "Ti/16", 5.5, 39, "apache-2.0", _AUGREG)
SMALL = Backbone("timm/vit_small_patch16_224.augreg_in21k", "S/16", 21.7, 120, "apache-2.0", _AUGREG)
BASE = Backbone("timm/vit_base_patch16_224.augreg_in21k", "B/16", 85.8, 410, "apache-2.0", _AUGREG)
BACKBONES = (TINY, SMALL, BASE)


def why_not(backbone: Backbone, fetching: Callable[[], None]) -> str:
    """Why a backbone cannot be had here, in a few words; empty if it lies in the local cache or the Hub offers it, and
    before the latter `fetching` is called."""
    try:
        from huggingface_hub import HfApi, constants
    except ImportError:
        return "the Hugging Face client is not installed (pip install 'vitrail[hub]')"
    if cached(backbone.spec):
        return ""
    if constants.HF_HUB_OFFLINE:
        return "none is in the local cache, and HF_HUB_OFFLINE is set"
    try:
        HfApi().model_info(backbone.repository, timeout=PATIENCE)
    except Exception:  # whatever keeps the Hub from answering, the run goes on without it
        return "none is in the local cache, and the Hub does not answer"
    fetching()
    return ""
