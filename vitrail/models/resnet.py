"""The convolutional networks of the paper: the stem of the hybrids, and the BiT ResNets it compares with.

Both use GroupNorm and standardise the weights of their convolutions. They differ in where the activation is (after the
norm that follows a convolution in the stem, before the convolution in BiT), in padding and in constants.
"""

from __future__ import annotations

from typing import Any, Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import GROUPS, ResNetConfig, StemConfig
from vitrail.models.layers import ClassifierHead, lecun_normal_


class StandardConv(nn.Conv2d):
    """A convolution whose filters are standardised to mean 0 and deviation 1 before use.

    `same` pads as TensorFlow does: as little as covers the image, the odd pixel at the end.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, config: Any, *, stride: int = 1, same: bool = False):
        self.eps, self.eps_in = config.weight_eps, config.weight_eps_in
        self.same = same and stride > 1
        padding = 0 if self.same else kernel // 2
        super().__init__(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)

    def reset_parameters(self) -> None:
        lecun_normal_(self.weight, fan_in=self.weight[0].numel())

    def standardised(self) -> Tensor:
        flat = self.weight.flatten(1)
        if self.eps_in == "variance":
            flat = F.layer_norm(flat, flat.shape[1:], eps=self.eps)
        else:
            variance, mean = torch.var_mean(flat, dim=1, correction=0, keepdim=True)
            flat = (flat - mean) / (variance.sqrt() + self.eps)
        return flat.view_as(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        if self.same:
            rows, columns = (max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[-2:])
            x = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
        elif kernel == 1 and stride > 1:
            # On a CPU, torch takes twice as long for the gradient of this convolution if it has a stride itself.
            x, stride = x[..., ::stride, ::stride], 1
        return F.conv2d(x, self.standardised(), None, stride, self.padding)


class NormRelu(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x), inplace=True)


class ZeroNorm(nn.GroupNorm):
    """Starts at zero, and with it the branch that it ends."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class PostActivation(nn.Module):
    """A bottleneck of the hybrid stem: convolution, norm, ReLU."""

    def __init__(self, inputs: int, width: int, stride: int, config: StemConfig):
        super().__init__()
        outputs, eps = 4 * width, config.norm_eps
        self.conv1 = StandardConv(inputs, width, 1, config)
        self.norm1 = NormRelu(GROUPS, width, eps)
        self.conv2 = StandardConv(width, width, 3, config, stride=stride, same=True)
        self.norm2 = NormRelu(GROUPS, width, eps)
        self.conv3 = StandardConv(width, outputs, 1, config)
        self.norm3 = ZeroNorm(GROUPS, outputs, eps)
        self.shortcut = self.shortcut_norm = None
        if stride > 1 or inputs != outputs:
            self.shortcut = StandardConv(inputs, outputs, 1, config, stride=stride)
            self.shortcut_norm = nn.GroupNorm(GROUPS, outputs, eps)

    def forward(self, x: Tensor) -> Tensor:
        skipped = x if self.shortcut is None else self.shortcut_norm(self.shortcut(x))  # type: ignore[misc]
        x = self.norm1(self.conv1(x))
        x = self.norm2(self.conv2(x))
        return F.relu(self.norm3(self.conv3(x)).add_(skipped), inplace=True)


class HybridStem(nn.Module):
    """Image -> feature map at a quarter of its size, halved again by every stage after the first."""

    def __init__(self, config: StemConfig, channels: int):
        super().__init__()
        self.root = StandardConv(channels, config.width, 7, config, stride=2, same=True)
        self.norm = nn.GroupNorm(GROUPS, config.width, config.norm_eps)
        self.stages = _stages(PostActivation, config)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.norm(self.root(pixels))
        # As TensorFlow pads: an even side has one row more at its end, which ceil_mode stands for.
        x = _max_pool(x, padding=(x.shape[-2] % 2, x.shape[-1] % 2), ceil_mode=True)
        return self.stages(F.relu(x, inplace=True))  # the same before or after the maximum; here on a quarter


class PreActivation(nn.Module):
    """A bottleneck of BiT: norm, ReLU, convolution; a changed shape is projected from the activated input."""

    def __init__(self, inputs: int, width: int, stride: int, config: ResNetConfig):
        super().__init__()
        outputs, eps = 4 * width, config.norm_eps
        self.norm1 = NormRelu(GROUPS, inputs, eps)
        self.conv1 = StandardConv(inputs, width, 1, config)
        self.norm2 = NormRelu(GROUPS, width, eps)
        self.conv2 = StandardConv(width, width, 3, config, stride=stride)
        self.norm3 = NormRelu(GROUPS, width, eps)
        self.conv3 = StandardConv(width, outputs, 1, config)
        changed = stride > 1 or inputs != outputs
        self.shortcut = StandardConv(inputs, outputs, 1, config, stride=stride) if changed else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.norm1(x)
        skipped = x if self.shortcut is None else self.shortcut(active)
        x = self.conv2(self.norm2(self.conv1(active)))
        return self.conv3(self.norm3(x)).add_(skipped)


class ResNet(nn.Module):
    trace: Never  # it has none; this lets type checkers pass `create(...).trace(...)`, which is for Vision Transformers

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        self.root = StandardConv(config.channels, config.width, 7, config, stride=2)
        self.stages = _stages(PreActivation, config)
        self.norm = NormRelu(GROUPS, config.features, config.norm_eps)
        count = config.num_classes
        self.head = ClassifierHead(config.features, count, config.head_bias) if count else nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) normalised pixels -> (B, num_classes) logits."""
        return self.head(self.forward_features(pixels))

    def forward_features(self, pixels: Tensor) -> Tensor:
        """The vector before the classifier, (B, features)."""
        x = self.root(pixels)
        if self.config.pool_padding == "zeros":  # which win over negative values beside them
            x = _max_pool(F.pad(x, (1, 1, 1, 1)), padding=0)
        else:
            x = _max_pool(x, padding=1)
        x = self.stages(x)
        return self.norm(x).mean(dim=(2, 3))


def _max_pool(x: Tensor, padding: int | tuple[int, int], ceil_mode: bool = False) -> Tensor:
    """The maximum of 3 x 3 at every other pixel. On a CPU, torch finds it ten times as fast with the channels last,
    which pays for moving them; but its backward pass is slower so."""
    if x.device.type == "cpu" and not x.requires_grad:
        x = x.contiguous(memory_format=torch.channels_last)
    return F.max_pool2d(x, 3, stride=2, padding=padding, ceil_mode=ceil_mode).contiguous()


def _stages(block: type[nn.Module], config: StemConfig | ResNetConfig) -> nn.Sequential:
    """Stage i has bottlenecks of 2^i times the root's width; all but the first halve the map."""
    inputs, stages = config.width, []
    for stage, count in enumerate(config.blocks):
        width = config.width * 2**stage
        units = []
        for unit in range(count):
            units.append(block(inputs, width, 2 if stage and not unit else 1, config))
            inputs = 4 * width
        stages.append(nn.Sequential(*units))
    return nn.Sequential(*stages)
