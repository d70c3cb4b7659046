"""Class relevance maps: attention weighted by its gradient (Chefer, Gur and Wolf, ICCV 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.interpret.attention import eval_mode, patch_map
from vitrail.models.trace import block_hooks
from vitrail.models.vit import VisionTransformer


def relevance(
    net: VisionTransformer, pixels: Tensor, classes: Sequence[int], against: Sequence[int] | None = None
) -> np.ndarray:
    """Maps (B, h, w) of the evidence for `classes`, one per image, or for `classes` over `against`.

    In each block, E_heads(max(0, A * dA)) is added to the identity, where dA is the gradient of the logit (or the
    difference of logits) in the attention A. The results are multiplied through all blocks.

    The forward pass stays fused: a head outputs A V, so dA is the gradient of the output times V transposed.
    """
    if not net.config.num_classes:
        raise UserError("these weights have no classifier, so there is no class to explain")
    inputs: list[Tensor] = []  # of each block
    head_outputs: list[Tensor] = []  # of each block before the output projection; last, those of the attention pool
    last: list[Tensor] = []  # the tokens that the pool reads

    def keep(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        head_outputs.append(arguments[0] if arguments[0].requires_grad else arguments[0].requires_grad_())

    projections = [block.attn.proj for block in net.blocks]
    if net.attn_pool is not None:
        projections.append(net.attn_pool.proj)
    hooks = [projection.register_forward_pre_hook(keep) for projection in projections]
    hooks.append(net.norm.register_forward_hook(lambda _, __, output: last.append(output.detach())))
    try:
        with torch.enable_grad(), eval_mode(net):
            with block_hooks(net, lambda _, x, __: inputs.append(x.detach())):
                logits = net(pixels)
            rows = torch.arange(len(pixels), device=logits.device)
            target = logits[rows, torch.as_tensor(classes, device=logits.device)]
            if against is not None:
                target = target - logits[rows, torch.as_tensor(against, device=logits.device)]
            gradients = torch.autograd.grad(target.sum(), head_outputs)
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        return _accumulate(net, inputs, gradients, last[0]).cpu().numpy()


def _accumulate(
    net: VisionTransformer, inputs: Sequence[Tensor], gradients: Sequence[Tensor], tokens: Tensor
) -> Tensor:
    """(B, h, w) relevance, from the inputs of blocks and the gradients of their head outputs."""
    count = inputs[0].shape[1]
    total = torch.eye(count, device=tokens.device).repeat(len(tokens), 1, 1)  # (B, T, T)
    for index, (x, gradient) in enumerate(
        zip(inputs, gradients, strict=False)
    ):  # an attention pool has one more gradient
        block = net.blocks[index]
        attention, x = block.attn, block.norm1(x)
        values = attention.qkv(x).unflatten(-1, (3, attention.heads, -1))[:, :, 2].transpose(1, 2)
        read = gradient.shape[1]  # the last block may compute only the tokens that are read
        weighted = _weighted(attention.weights(x)[:, :, :read], gradient, values)
        total[:, :read] += weighted @ total
    if net.attn_pool is not None:
        values = net.attn_pool.split(tokens)[2]
        weighted = _weighted(net.attn_pool.weights(tokens), gradients[-1].unsqueeze(1), values)
        return (weighted @ total)[:, 0, net.config.prefix :].unflatten(1, net.config.grid)
    total.diagonal(dim1=1, dim2=2).sub_(1)  # self-relevance would be a constant veil under a mean of patches
    return patch_map(net, total, tokens)


def _weighted(attention: Tensor, gradient: Tensor, values: Tensor) -> Tensor:
    """E_heads(max(0, A * dA)), (B, R, T).

    `attention` A is (B, heads, R, T), `gradient` of the head outputs (B, R, D), `values` (B, heads, T, D/heads).
    """
    heads = attention.shape[1]
    attention_gradient = gradient.unflatten(-1, (heads, -1)).transpose(1, 2) @ values.transpose(
        -2, -1
    )  # (B, heads, R, T)
    return (attention_gradient * attention).clamp_min(0).mean(1).float()
