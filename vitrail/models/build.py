"""Building networks from a name or a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.config import NetworkConfig, ResNetConfig, Size
from vitrail.models.resnet import ResNet
from vitrail.models.variants import config_from_name
from vitrail.models.vit import VisionTransformer

Network = VisionTransformer | ResNet


def build_model(config: NetworkConfig) -> Network:
    """Build the network that a config describes, with newly initialized weights."""
    return ResNet(config) if isinstance(config, ResNetConfig) else VisionTransformer(config)


def build_from_state_dict(config: NetworkConfig, state: Mapping[str, Tensor]) -> Network:
    """Build a network around existing tensors, without initializing or copying."""
    with torch.device("meta"):
        net = build_model(config)
    net.load_state_dict(state, assign=True)
    return net


def create(name: str, num_classes: int = 1000, image_size: int | Size = 224, **options: Any) -> Network:
    """Build a network with newly initialized weights, as in the paper.

    Parameters
    ----------
    name
        A Vision Transformer such as "S/16" (size, patch size), a hybrid such as "R50+B/16", or a ResNet such as
        "R50x1". `vitrail models` lists all names.
    num_classes
        Number of logits; 0 for a network without a classifier, which returns features.
    image_size
        Image size in pixels: one number for square images, or (height, width).
    options
        Further fields of the network config, such as pool="gap" or registers=4.

    Returns
    -------
    torch.nn.Module
        A VisionTransformer or a ResNet, on the CPU and in training mode. It takes normalised pixels (B, C, H, W) and
        returns logits (B, num_classes).

    Examples
    --------
    >>> net = vitrail.create("S/16", num_classes=10, image_size=(224, 320), pool="gap")
    """
    return build_model(config_from_name(name, num_classes, image_size, **options))
