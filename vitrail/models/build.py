"""From a name or a config to a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.config import NetworkConfig, ResNetConfig, Size
from vitrail.models.resnet import ResNet
from vitrail.models.variants import configure
from vitrail.models.vit import VisionTransformer

Network = VisionTransformer | ResNet


def build(config: NetworkConfig) -> Network:
    """The network a config describes, with fresh weights."""
    return ResNet(config) if isinstance(config, ResNetConfig) else VisionTransformer(config)


def build_with(config: NetworkConfig, state: Mapping[str, Tensor]) -> Network:
    """The network with these weights, which it takes as they are: nothing is initialised or copied."""
    with torch.device("meta"):
        net = build(config)
    net.load_state_dict(state, assign=True)
    return net


def create(name: str, num_classes: int = 1000, image_size: int | Size = 224, **options: Any) -> Network:
    """A network by name with fresh weights: `create("S/16", num_classes=10, image_size=(224, 320), pool="gap")`."""
    return build(configure(name, num_classes, image_size, **options))
