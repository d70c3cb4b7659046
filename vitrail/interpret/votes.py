"""Why this class rather than that one, where a network reads the mean of its patches: its answer is theirs added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.interpret.attention import eval_mode, final_tokens
from vitrail.interpret.relevance import relevance
from vitrail.models.layers import Classifier
from vitrail.models.vit import VisionTransformer


def can_vote(net: VisionTransformer) -> bool:
    """Whether logits are a mean over patches: mean pooling, and only a linear classifier after it."""
    config = net.config
    return config.pool == "gap" and config.norm == "before_pool" and not config.representation


@torch.no_grad()
def votes(
    net: VisionTransformer, pixels: Tensor, classes: Sequence[int], against: Sequence[int] | None = None
) -> np.ndarray:
    """What each patch says for `classes`, one for each image, (B, h, w), below zero where it speaks against them. Its
    mean is the logit less that of `against`, but for the classifier's bias; without `against`, less the mean of all
    logits. Class activation mapping (Zhou et al. 2016), exact here, but what a patch says it has learned from others.
    """
    if not net.config.num_classes or not can_vote(net):
        raise UserError("votes of patches need a classifier on their mean: this network has none, so take relevance")
    with eval_mode(net):
        patches = final_tokens(net, pixels)[:, net.config.prefix :].float()  # (B, h*w, D)
    weight = cast(Classifier, net.head).weight.float()
    some = weight[torch.as_tensor(classes, device=weight.device)]
    if against is not None:
        others = weight[torch.as_tensor(against, device=weight.device)]
    else:  # one class alone has nothing to stand against
        others = weight.mean(0, keepdim=True) if len(weight) > 1 else torch.zeros_like(weight)
    said = torch.einsum("bnd,bd->bn", patches, some - others)
    return said.unflatten(1, net.config.grid).cpu().numpy()


def class_map(
    net: VisionTransformer, pixels: Tensor, classes: Sequence[int], against: Sequence[int] | None = None
) -> np.ndarray:
    """The map to show of what spoke for a class: votes where patches have them, else relevance."""
    if can_vote(net) and net.config.num_classes:
        return votes(net, pixels, classes, against).clip(min=0)
    return relevance(net, pixels, classes, against)
