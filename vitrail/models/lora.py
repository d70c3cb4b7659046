"""LoRA (Hu et al. 2021): trainable low-rank updates of frozen linear layers, merged into them after training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import LoraConfig
from vitrail.errors import UserError
from vitrail.models.vit import Block


class LoraLinear(nn.Linear):
    """A frozen linear layer with a trainable low-rank update: y = W x + bias + alpha/rank B (A x).

    B A is never materialized, so no gradient has the size of W. A fused qkv layer shares one A; its B has rows for each
    of query, key and value. B starts at zero, so the initial output is that of the frozen layer.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / rank
        device = layer.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features, dtype=torch.float32, device=device))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=torch.float32, device=device))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)  # as nn.Linear: uniform up to 1 / sqrt(in_features)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.lora_a.to(x.dtype)) * self.scale  # (..., rank)
        return super().forward(x) + F.linear(low, self.lora_b.to(low.dtype))

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The equivalent nn.Linear. The update is added to this layer's weight in place."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        self.weight.copy_(self.weight.float() + self.scale * (self.lora_b @ self.lora_a))
        layer.weight, layer.bias = self.weight, self.bias
        return layer.train(self.training)


def add_lora(net: nn.Module, config: LoraConfig) -> None:
    """Replace linear layers of the blocks by LoraLinear and freeze the rest except the head. Rank 0 changes nothing."""
    if not config.rank:
        return
    chosen = list(_layers(net, mlp=config.target_modules == "all"))
    if not chosen:
        raise UserError("lora.rank has no effect without Transformer blocks, and this network has none; remove it")
    largest = min(min(layer.weight.shape) for _, _, layer in chosen)
    if config.rank > largest:
        raise UserError(f"lora.rank={config.rank} is too large: the largest rank for this network is {largest}")
    for name, parameter in net.named_parameters():
        if "head" not in name.split("."):
            parameter.requires_grad_(False)
    for parent, name, layer in chosen:
        setattr(parent, name, LoraLinear(layer, config.rank, config.alpha).train(layer.training))


def merge_lora(net: nn.Module) -> None:
    """Merge all updates: LoraLinear layers become nn.Linear again, with the original names and shapes."""
    for parent, name, layer in list(_layers(net, mlp=True)):
        if isinstance(layer, LoraLinear):
            setattr(parent, name, layer.merged())


def _layers(net: nn.Module, mlp: bool) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers of all blocks, as (parent module, attribute name, layer)."""
    for block in net.modules():
        if isinstance(block, Block):
            for parent in (block.attn, block.mlp) if mlp else (block.attn,):
                for name, layer in parent.named_children():
                    if isinstance(layer, nn.Linear):
                        yield parent, name, layer
