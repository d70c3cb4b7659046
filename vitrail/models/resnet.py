"""The convolutional networks of the paper: the stem of the hybrids, and the BiT ResNets that it compares with.

Both use GroupNorm and weight standardization. The stem is post-activation (convolution, norm, ReLU), BiT pre-activation
(norm, ReLU, convolution). Padding and constants differ too.
"""

from __future__ import annotations

from typing import Any, Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import GROUPS, ResNetConfig, StemConfig
from vitrail.models.layers import ClassifierHead, lecun_normal_


class StandardConv(nn.Conv2d):
    """A convolution with weight standardization (filters have mean 0 and standard deviation 1).

    `same` is TensorFlow's SAME padding, with the odd pixel at the end.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, config: Any, *, stride: int = 1, same: bool = False):
        self.eps, self.eps_in = config.weight_eps, config.weight_eps_in
        self.same = same and stride > 1
        padding = 0 if self.same else kernel // 2
        super().__init__(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)

    def reset_parameters(self) -> None:
        lecun_normal_(self.weight, fan_in=self.weight[0].numel())

    def standardized_weight(self) -> Tensor:
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
            # On CPUs, the backward pass of a strided 1x1 convolution takes twice as long.
            x, stride = x[..., ::stride, ::stride], 1
        return F.conv2d(x, self.standardized_weight(), None, stride, self.padding)


class NormRelu(nn.GroupNorm):
    """GroupNorm followed by ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x), inplace=True)


class ZeroNorm(nn.GroupNorm):
    """GroupNorm with zero initial weight, so its residual branch starts at zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class PostActivation(nn.Module):
    """Bottleneck block of the hybrid stem: convolution, norm, ReLU."""

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
    """Image -> feature map at 1/4 resolution, halved by every stage after the first."""

    def __init__(self, config: StemConfig, channels: int):
        super().__init__()
        self.root = StandardConv(channels, config.width, 7, config, stride=2, same=True)
        self.norm = nn.GroupNorm(GROUPS, config.width, config.norm_eps)
        self.stages = _stages(PostActivation, config)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.norm(self.root(pixels))
        # TensorFlow's SAME padding: ceil_mode adds the row that an even side needs at its end.
        x = _max_pool(x, padding=(x.shape[-2] % 2, x.shape[-1] % 2), ceil_mode=True)
        return self.stages(F.relu(x, inplace=True))  # ReLU and max pooling commute; here on a quarter of the pixels


class PreActivation(nn.Module):
    """Bottleneck block of BiT: norm, ReLU, convolution. The shortcut projects the activated input."""

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
    """A BiT ResNet."""

    trace: Never  # does not exist; lets type checkers accept create(...).trace(...)

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
        """The input of the classifier, (B, features)."""
        x = self.root(pixels)
        if self.config.pool_padding == "zeros":  # zeros exceed negative values at the border
            x = _max_pool(F.pad(x, (1, 1, 1, 1)), padding=0)
        else:
            x = _max_pool(x, padding=1)
        x = self.stages(x)
        return self.norm(x).mean(dim=(2, 3))


def _max_pool(x: Tensor, padding: int | tuple[int, int], ceil_mode: bool = False) -> Tensor:
    """3x3 max pooling with stride 2. On CPUs, channels_last makes the forward pass ten times faster, but the backward
    pass slower."""
    if x.device.type == "cpu" and not x.requires_grad:
        x = x.contiguous(memory_format=torch.channels_last)
    return F.max_pool2d(x, 3, stride=2, padding=padding, ceil_mode=ceil_mode).contiguous()


def _stages(block: type[nn.Module], config: StemConfig | ResNetConfig) -> nn.Sequential:
    """Stage i has bottlenecks of 2^i times the root's width; every stage but the first halves the resolution."""
    inputs, stages = config.width, []
    for stage, count in enumerate(config.blocks):
        width = config.width * 2**stage
        units = []
        for unit in range(count):
            units.append(block(inputs, width, 2 if stage and not unit else 1, config))
            inputs = 4 * width
        stages.append(nn.Sequential(*units))
    return nn.Sequential(*stages)
