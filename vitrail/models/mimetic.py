"""Random weights of attention that look like trained ones (Trockman and Kolter 2023, "Mimetic Initialization").

In trained networks a head's queries and keys nearly agree, so that tokens attend to those like themselves - with waves
as positions, their neighbours - and values times output projection are nearly a negative identity. Starting there saves
a small network on little data a part of its training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.models.vit import Attention

AGREEMENT, AGREEMENT_NOISE = 0.7, 0.7  # the paper's numbers for networks of this kind
IDENTITY, IDENTITY_NOISE = -0.4, 0.4


@torch.no_grad()
def mimetic_(net: nn.Module) -> None:
    """Draw the weights of all attention anew."""
    for module in net.modules():
        if isinstance(module, Attention):
            width, size = module.proj.in_features, module.proj.in_features // module.heads
            pairs = [_factors(width, AGREEMENT, AGREEMENT_NOISE) for _ in range(module.heads)]
            queries = torch.cat([left[:, :size].mT for left, _ in pairs])
            keys = torch.cat([right[:size] for _, right in pairs])
            proj, values = _factors(width, IDENTITY, IDENTITY_NOISE)
            module.qkv.weight.copy_(torch.cat([queries, keys, values]))
            module.proj.weight.copy_(proj)


def _factors(width: int, identity: float, noise: float) -> tuple[Tensor, Tensor]:
    """Two matrices whose product is `identity` times the identity plus noise; their first columns and rows are what a
    smaller product keeps of it."""
    wanted = identity * torch.eye(width) + noise * torch.randn(width, width) / width**0.5
    left, values, right = torch.linalg.svd(wanted)
    root = values.sqrt()
    return left * root, root[:, None] * right
