"""The Vision Transformer, as Figure 1 of the paper draws it: tokens + positions -> encoder -> pool -> head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitrail.config import ModelConfig, Size
from vitrail.model.encoder import Encoder
from vitrail.model.heads import Classifier, Pool, Representation
from vitrail.model.positions import LearnedPositions
from vitrail.model.tokens import Tokens
from vitrail.model.variants import configure


class VisionTransformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.tokens = Tokens(config)
        self.positions = LearnedPositions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Encoder(config)
        self.pool = Pool(config)
        size = config.representation
        self.representation = Representation(config.width, size) if size else nn.Identity()
        features = size or config.width
        bias = config.head_bias
        self.head = Classifier(features, config.num_classes, bias) if config.num_classes else nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) normalised pixels -> (B, num_classes) logits."""
        return self.head(self.forward_features(pixels))

    def forward_features(self, pixels: Tensor) -> Tensor:
        """The vector before the classifier, (B, D)."""
        x = self.tokens(pixels)
        x = self.dropout(self.positions(x))
        x = self.encoder(x, keep=self.pool.reads)
        return self.representation(self.pool(x))


def create(name: str, num_classes: int = 1000, image_size: int | Size = 224, **options: Any) -> VisionTransformer:
    """A network by name with fresh weights: `create("S/16", num_classes=10, image_size=(224, 320), pool="gap")`."""
    return VisionTransformer(configure(name, num_classes, image_size, **options))
