"""Networks of other libraries with vitrail's weights, and a check that they compute the same outputs and gradients."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.renaming import (
    TIMM,
    TIMM_RESNET,
    TIMM_ROOT_ALONE,
    TORCHVISION,
    TRANSFORMERS,
    TRANSFORMERS_OLD,
    Named,
    head_as_convolution,
    renamed,
    split_qkv,
)
from vitrail.config import GROUPS, ModelConfig, NetworkConfig, ResNetConfig, StemConfig
from vitrail.models.build import Network, build_model
from vitrail.weights.reference_models import make_torchvision_importable


class NotComparable(Exception):
    """The library cannot build this network, or is not installed."""


class Peer(nn.Module):
    """A network of another library. `translate` renames vitrail's tensors (weights or gradients) to its names."""

    def __init__(self, net: nn.Module, translate: Callable[[Named], dict[str, Tensor]]):
        super().__init__()
        self.net = net
        self.translate = translate

    def forward(self, pixels: Tensor) -> Tensor:
        out = self.net(pixels)
        return out if isinstance(out, Tensor) else out.logits


def timm_network(config: NetworkConfig) -> Peer:
    return timm_resnet(config) if isinstance(config, ResNetConfig) else timm_vit(config)


def timm_vit(config: ModelConfig) -> Peer:
    from timm.layers import HybridEmbed, PatchEmbed
    from timm.models.vision_transformer import VisionTransformer

    stem = config.stem
    net = VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch[0],
        num_classes=config.num_classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_dim / config.width,
        act_layer={"erf": "gelu", "tanh": "gelu_tanh"}[config.gelu],
        global_pool={"token": "token", "gap": "avg", "map": "map"}[config.pool],
        fc_norm=config.norm == "after_pool",
        class_token=config.class_token,
        reg_tokens=config.registers,
        no_embed_class=not config.prefix_positions,
        init_values=config.layer_scale,
        embed_layer=partial(HybridEmbed, backbone=timm_stem(stem)) if stem else PatchEmbed,
    )
    replacements = TIMM_ROOT_ALONE if stem and not stem.blocks else TIMM
    return Peer(net, lambda named: renamed(named, replacements))


def timm_stem(config: StemConfig) -> nn.Module:
    from timm.layers import StdConv2dSame
    from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem

    layers = {"conv_layer": partial(StdConv2dSame, eps=weight_eps(config)), "norm_layer": timm_norm(config)}
    if not config.blocks:
        return create_resnetv2_stem(3, config.width, "same", preact=False, **layers)
    return ResNetV2(
        list(config.blocks),
        timm_channels(config),
        num_classes=0,
        global_pool="",
        stem_chs=config.width,
        stem_type="same",
        preact=False,
        **layers,
    )


def timm_resnet(config: ResNetConfig) -> Peer:
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    net = ResNetV2(
        list(config.blocks),
        timm_channels(config),
        num_classes=config.num_classes,
        stem_chs=config.width,
        stem_type={"zeros": "fixed", "none": ""}[config.pool_padding],
        conv_layer=partial(StdConv2d, eps=weight_eps(config)),
        norm_layer=timm_norm(config),
    )
    return Peer(net, lambda named: renamed(head_as_convolution(named), TIMM_RESNET))


def timm_channels(config: StemConfig | ResNetConfig) -> tuple[int, ...]:
    return tuple(config.width * 4 * 2**stage for stage in range(len(config.blocks)))


def timm_norm(config: StemConfig | ResNetConfig) -> Callable[..., nn.Module]:
    from timm.layers import GroupNormAct

    return partial(GroupNormAct, num_groups=GROUPS, eps=config.norm_eps)


def weight_eps(config: StemConfig | ResNetConfig) -> float:
    if config.weight_eps_in != "variance":
        raise NotComparable("timm standardises weights only with epsilon in the variance")
    return config.weight_eps


def torchvision_vit(config: NetworkConfig) -> Peer:
    source = importlib.import_module("torchvision.models.vision_transformer")
    config = plain(config, "torchvision")
    if config.gelu != "erf":
        raise NotComparable("torchvision has only the erf GELU")
    net = source.VisionTransformer(
        image_size=config.image_size[0],
        patch_size=config.patch[0],
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_dim,
        num_classes=config.num_classes,
    )
    return Peer(net, lambda named: renamed(named, TORCHVISION))


def transformers_vit(config: NetworkConfig) -> Peer:
    from transformers import ViTConfig, ViTForImageClassification

    config = plain(config, "transformers")
    settings = ViTConfig(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp_dim,
        hidden_act={"erf": "gelu", "tanh": "gelu_pytorch_tanh"}[config.gelu],
        layer_norm_eps=config.norm_eps,
        image_size=config.image_size[0],
        patch_size=config.patch[0],
        num_labels=config.num_classes,
        attn_implementation="sdpa",
    )
    net = ViTForImageClassification(settings)
    replacements = TRANSFORMERS if hasattr(net.vit, "layers") else TRANSFORMERS_OLD
    return Peer(net, lambda named: renamed(split_qkv(named), replacements))


def plain(config: NetworkConfig, library: str) -> ModelConfig:
    """Return the config if it is a plain ViT with a class token; raise NotComparable otherwise."""
    if isinstance(config, ModelConfig):
        extras = [config.stem, config.registers, config.layer_scale, not config.prefix_positions]
        if config.pool == "token" and not any(extras):
            return config
    raise NotComparable(f"{library} is only compared on the plain ViT")


PEERS: dict[str, Callable[[NetworkConfig], Peer]] = {
    "timm": timm_network,
    "transformers": transformers_vit,
    "torchvision": torchvision_vit,
}


def build_ours(config: NetworkConfig, seed: int = 0) -> Network:
    """Build vitrail's network, with noise added to all weights: weights initialised to 0 would hide differences."""
    torch.manual_seed(seed)
    net = build_model(config)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return net


def build_peer(name: str, ours: Network) -> Peer:
    """Build the network of another library with the weights of `ours`."""
    make_torchvision_importable()
    try:
        peer = PEERS[name](ours.config)
    except ImportError as error:
        raise NotComparable(f"{name} cannot be imported ({error})") from None
    peer.net.load_state_dict(peer.translate(ours.state_dict()))
    return peer


def disagreement(ours: Network, peer: Peer, pixels: Tensor) -> tuple[float, float]:
    """Return the largest difference of the logits and the relative difference of all gradients.

    Gradients are compared in double precision. In single precision, rounding can change the sign of a ReLU's input, so
    that only one of the two networks has a gradient there.
    """
    with torch.no_grad():
        logits = float((ours(pixels) - peer(pixels)).abs().max())
    expected = peer.translate(gradients(ours, pixels))
    actual = {name.removeprefix("net."): gradient for name, gradient in gradients(peer, pixels).items()}
    if expected.keys() != actual.keys():
        raise AssertionError(f"gradients of only one network: {sorted(expected.keys() ^ actual.keys())}")
    # Over all tensors together: the true gradient of a key bias is 0 (softmax cancels it), so it has only rounding.
    difference = total_norm(actual[name] - gradient for name, gradient in expected.items())
    return logits, difference / total_norm(expected.values())


def gradients(net: nn.Module, pixels: Tensor) -> dict[str, Tensor]:
    """Gradients of a cross-entropy loss in double precision, by parameter name."""
    net = copy.deepcopy(net).double()
    labels = torch.arange(len(pixels), device=pixels.device)
    F.cross_entropy(net(pixels.double()), labels).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def total_norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))
