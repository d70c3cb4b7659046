"""LoRA (Hu et al. 2021): low-rank updates beside frozen matrices, merged into them in the end."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import LoraConfig
from vitrail.errors import UserError
from vitrail.models.vit import Block


class LoraLinear(nn.Linear):
    """A frozen linear layer W with a trained update B A: y = W x + bias + alpha/rank B (A x).

    The update is applied to the input and never to W: then a step computes no gradient as large as W. A fused qkv
    has one A for all three, and a B for each. B starts at zero, and the layer as it was.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / rank
        where = layer.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features, dtype=torch.float32, device=where))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=torch.float32, device=where))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)  # as nn.Linear starts: up to 1 / sqrt(inputs), either way

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.lora_a.to(x.dtype)) * self.scale  # (..., rank)
        return super().forward(x) + F.linear(low, self.lora_b.to(low.dtype))

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The plain layer that computes the same, with this one's weights changed in place."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        self.weight.copy_(self.weight.float() + self.scale * (self.lora_b @ self.lora_a))
        layer.weight, layer.bias = self.weight, self.bias
        return layer.train(self.training)


def add_lora(net: nn.Module, config: LoraConfig) -> None:
    """Freeze all but the head, and put updates of low rank beside matrices of the blocks. Rank 0: change nothing."""
    if not config.rank:
        return
    chosen = list(_layers(net, mlp=config.target_modules == "all"))
    if not chosen:
        raise UserError("LoRA is for Transformer blocks, and this network has none: use --set lora.rank=0")
    largest = min(min(layer.weight.shape) for _, _, layer in chosen)
    if config.rank > largest:
        raise UserError(f"lora.rank is {config.rank}, but the matrices of this network have rank {largest} at most")
    for name, parameter in net.named_parameters():
        if "head" not in name.split("."):
            parameter.requires_grad_(False)
    for parent, name, layer in chosen:
        setattr(parent, name, LoraLinear(layer, config.rank, config.alpha).train(layer.training))


def merge_lora(net: nn.Module) -> None:
    """Add the updates to the matrices they are beside: plain layers again, with the names and shapes of before."""
    for parent, name, layer in list(_layers(net, mlp=True)):
        if isinstance(layer, LoraLinear):
            setattr(parent, name, layer.merged())


def _layers(net: nn.Module, mlp: bool) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Linear layers of all blocks, each with what holds it and the name it has there."""
    for block in net.modules():
        if isinstance(block, Block):
            for parent in (block.attn, block.mlp) if mlp else (block.attn,):
                for name, layer in parent.named_children():
                    if isinstance(layer, nn.Linear):
                        yield parent, name, layer
