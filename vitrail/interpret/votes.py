"""Votes of patches: with mean pooling, a logit is the mean of contributions of the patches (Zhou et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.interpret.attention import eval_mode, final_tokens
from vitrail.interpret.relevance import relevance
from vitrail.models.layers import ClassifierHead
from vitrail.models.vit import VisionTransformer


def can_vote(net: VisionTransformer) -> bool:
    """Whether logits are a mean over patches: mean pooling followed by a linear classifier only."""
    config = net.config
    return config.pool == "gap" and config.norm == "before_pool" and not config.representation


@torch.no_grad()
def votes(
    net: VisionTransformer, pixels: Tensor, classes: Sequence[int], against: Sequence[int] | None = None
) -> np.ndarray:
    """Contribution of each patch to the logits of `classes`, one class per image, (B, h, w).

    The mean of a map is the logit minus that of `against`, without the bias. Without `against`, it is the logit minus
    the mean of all logits. This is class activation mapping (Zhou et al. 2016), exact for these networks.
    """
    if not net.config.num_classes or not can_vote(net):
        raise UserError(
            "votes need mean pooling and a linear classifier, which this network does not have; use relevance"
        )
    with eval_mode(net):
        patches = final_tokens(net, pixels)[:, net.config.prefix :].float()  # (B, h*w, D)
    weight = cast(ClassifierHead, net.head).weight.float()
    target = weight[torch.as_tensor(classes, device=weight.device)]
    if against is not None:
        reference = weight[torch.as_tensor(against, device=weight.device)]
    else:  # a single class has no others to subtract
        reference = weight.mean(0, keepdim=True) if len(weight) > 1 else torch.zeros_like(weight)
    contributions = torch.einsum("bnd,bd->bn", patches, target - reference)
    return contributions.unflatten(1, net.config.grid).cpu().numpy()


def class_map(
    net: VisionTransformer, pixels: Tensor, classes: Sequence[int], against: Sequence[int] | None = None
) -> np.ndarray:
    """The evidence map of a class, (B, h, w): positive votes where the network has them, else relevance."""
    if can_vote(net) and net.config.num_classes:
        return votes(net, pixels, classes, against).clip(min=0)
    return relevance(net, pixels, classes, against)
