"""What a network costs, known before anything runs."""

from __future__ import annotations

from vitrail.config import ModelConfig


def parameters(config: ModelConfig) -> int:
    """The exact number of parameters."""
    width, patch = config.width, config.patch[0] * config.patch[1] * config.channels
    embedding = patch * width + width + int(config.class_token) * width + config.sequence * width
    block = 4 * width * width + 4 * width + 2 * width * config.mlp_dim + config.mlp_dim + width + 4 * width
    features = config.representation or width
    representation = config.representation * (width + 1)
    head = config.num_classes * (features + 1)
    return embedding + config.depth * block + 2 * width + representation + head


def macs(config: ModelConfig) -> int:
    """Multiply-adds of one image's forward pass; training takes about three times as many."""
    tokens, width = config.sequence, config.width
    patches = config.grid[0] * config.grid[1]
    embedding = patches * config.patch[0] * config.patch[1] * config.channels * width
    block = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * config.mlp_dim
    features = config.representation or width
    return embedding + config.depth * block + config.representation * width + config.num_classes * features
