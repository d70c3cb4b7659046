"""The Vision Transformer, as Figure 1 of the paper draws it: tokens + positions -> encoder -> pool -> head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.models.axial import ColumnAttention, RowAttention
from vitrail.models.encoder import Attention, Block, Encoder, Watch
from vitrail.models.heads import AttentionPool, Classifier, Pool, Representation
from vitrail.models.pos_embed import added_positions
from vitrail.models.tokens import Tokens


@dataclass(frozen=True)
class Trace:
    """What `trace` saw. Tokens are those a block gives on: `[class token, registers,] patches` in raster order."""

    logits: Tensor  # (B, num_classes), bit for bit those of the plain call
    attention: dict[int, Tensor]  # block: (B, heads, T, T); row i says where token i looked
    tokens: dict[int, Tensor]  # block: (B, T, D)


class VisionTransformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.tokens = Tokens(config)
        self.positions = added_positions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Encoder(config, (RowAttention, ColumnAttention) if config.axial else (Attention,))
        self.pool = AttentionPool(config) if config.pool == "map" else Pool(config)
        size = config.representation
        self.representation = Representation(config.width, size) if size else nn.Identity()
        features = size or config.width
        bias = config.head_bias
        self.head = Classifier(features, config.num_classes, bias) if config.num_classes else nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) normalised pixels -> (B, num_classes) logits."""
        return self.head(self.forward_features(pixels))

    def forward_features(self, pixels: Tensor, watch: Watch | None = None) -> Tensor:
        """The vector before the classifier, (B, D). `watch` is shown what each block gets and gives."""
        return self.representation(self.pool(self.encode(self.tokens(pixels), self.pool.reads, watch)))

    def encode(self, x: Tensor, keep: int | None = None, watch: Watch | None = None) -> Tensor:
        """Tokens (B, T, D) as they are before positions -> those the encoder ends with; `keep`: only so many leading
        ones."""
        if self.config.positions_at == "stem":
            x = self.positions(x)
        return self.encoder(self.dropout(x), keep, self._at_every_block(), watch)

    def trace(self, pixels: Tensor, layers: Sequence[int] | None = None) -> Trace:
        """Attention and tokens of chosen blocks (all, if none are named; -1 is the last), computed beside the fused
        path from the inputs it kept, so that the logits do not change by one bit and only those blocks cost more."""
        count = len(self.encoder.blocks)
        if layers is not None and not all(isinstance(index, int) for index in layers):
            raise TypeError("layers are numbers of blocks, such as [0, -1]")
        wrong = [index for index in layers or () if not -count <= index < count]
        if wrong:
            raise ValueError(f"there is no block {wrong[0]}: this network has blocks 0 to {count - 1}")
        chosen = set(range(count) if layers is None else (index % count for index in layers))
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def watch(index: int, x: Tensor, given: Tensor) -> None:
            if index in chosen:
                seen[index] = x, given

        logits = self.head(self.forward_features(pixels, watch))
        attention, tokens = {}, {}
        for index, (x, given) in seen.items():
            block = cast(Block, self.encoder.blocks[index])
            attention[index] = block.attention.weights(block.norm1(x))
            whole = given.shape[1] == x.shape[1]  # the last block may have computed only what is read
            tokens[index] = given if whole else block(x)
        return Trace(logits, attention, tokens)

    def _at_every_block(self) -> Sequence[nn.Module] | None:
        """What is added to the input of each block."""
        if self.config.positions_at == "stem":
            return None
        if isinstance(self.positions, nn.ModuleList):
            return list(self.positions)
        return [self.positions] * self.config.blocks
