"""The Vision Transformer, as Figure 1 of the paper draws it: tokens + positions -> encoder -> pool -> head."""

from __future__ import annotations

from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.model.encoder import Encoder
from vitrail.model.heads import Classifier, Pool, Representation
from vitrail.model.positions import LearnedPositions
from vitrail.model.tokens import Tokens


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
        x = self.encoder(x)
        return self.representation(self.pool(x))
