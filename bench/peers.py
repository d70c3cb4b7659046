"""The other libraries' Vision Transformers, given our weights: the same maths, proven by comparing what comes out."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ModelConfig
from vitrail.model.vit import VisionTransformer

Named = Mapping[str, Tensor]
Words = list[tuple[str, str]]  # (part of our parameter's name, the same part of theirs)

TIMM: Words = [
    ("tokens.class_token", "cls_token"),
    ("tokens.projection", "patch_embed.proj"),
    ("positions.table", "pos_embed"),
    ("encoder.", ""),
    ("attention.qkv", "attn.qkv"),
    ("attention.out", "attn.proj"),
    ("mlp.up", "mlp.fc1"),
    ("mlp.down", "mlp.fc2"),
]
TORCHVISION: Words = [
    ("encoder.blocks.", "encoder.layers.encoder_layer_"),
    ("encoder.norm", "encoder.ln"),
    ("tokens.class_token", "class_token"),
    ("tokens.projection", "conv_proj"),
    ("positions.table", "encoder.pos_embedding"),
    ("norm1", "ln_1"),
    ("norm2", "ln_2"),
    ("attention.qkv.", "self_attention.in_proj_"),
    ("attention.out", "self_attention.out_proj"),
    ("mlp.up", "mlp.0"),
    ("mlp.down", "mlp.3"),
    ("head.", "heads.head."),
]
TRANSFORMERS: Words = [
    ("encoder.norm", "vit.layernorm"),
    ("encoder.blocks", "vit.layers"),
    ("tokens.class_token", "vit.embeddings.cls_token"),
    ("tokens.projection", "vit.embeddings.patch_embeddings.projection"),
    ("positions.table", "vit.embeddings.position_embeddings"),
    ("norm1", "layernorm_before"),
    ("norm2", "layernorm_after"),
    ("attention.out", "attention.o_proj"),
    ("mlp.up", "mlp.fc1"),
    ("mlp.down", "mlp.fc2"),
    ("head", "classifier"),
]
# Releases of transformers before the layers were renamed.
TRANSFORMERS_OLD: Words = [
    ("vit.layers", "vit.encoder.layer"),
    ("attention.q_proj", "attention.attention.query"),
    ("attention.k_proj", "attention.attention.key"),
    ("attention.v_proj", "attention.attention.value"),
    ("attention.o_proj", "attention.output.dense"),
    ("mlp.fc1", "intermediate.dense"),
    ("mlp.fc2", "output.dense"),
]


def renamed(named: Named, words: Words) -> dict[str, Tensor]:
    result = {}
    for name, tensor in named.items():
        for ours, theirs in words:
            name = name.replace(ours, theirs)
        result[name] = tensor
    return result


def split_qkv(named: Named) -> dict[str, Tensor]:
    """transformers keeps query, key and value apart."""
    result: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if ".qkv." in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            result |= {name.replace(".qkv.", f".{letter}_proj."): part for letter, part in parts}
        else:
            result[name] = tensor
    return result


class Peer(nn.Module):
    """Another library's network; `translate` turns our named tensors (weights, or their gradients) into its own."""

    def __init__(self, net: nn.Module, translate: Callable[[Named], dict[str, Tensor]]):
        super().__init__()
        self.net = net
        self.translate = translate

    def forward(self, pixels: Tensor) -> Tensor:
        out = self.net(pixels)
        return out if isinstance(out, Tensor) else out.logits


def timm_vit(config: ModelConfig) -> Peer:
    from timm.models.vision_transformer import VisionTransformer

    net = VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch[0],
        num_classes=config.num_classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_dim / config.width,
        act_layer={"erf": "gelu", "tanh": "gelu_tanh"}[config.gelu],
    )
    return Peer(net, lambda named: renamed(named, TIMM))


def torchvision_vit(config: ModelConfig) -> Peer:
    source = importlib.import_module("torchvision.models.vision_transformer")
    if config.gelu != "erf":
        raise NotComparable("torchvision has the erf GELU only")
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


def transformers_vit(config: ModelConfig) -> Peer:
    from transformers import ViTConfig, ViTForImageClassification

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
    words = TRANSFORMERS if hasattr(net.vit, "layers") else TRANSFORMERS + TRANSFORMERS_OLD
    return Peer(net, lambda named: renamed(split_qkv(named), words))


PEERS: dict[str, Callable[[ModelConfig], Peer]] = {
    "timm": timm_vit,
    "transformers": transformers_vit,
    "torchvision": torchvision_vit,
}


def build_ours(config: ModelConfig, seed: int = 0) -> VisionTransformer:
    """Our network with noise on every weight: the zeros it starts from would hide any difference."""
    torch.manual_seed(seed)
    net = VisionTransformer(config)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return net


class NotComparable(Exception):
    """The peer cannot take part; the message says why."""


def build_peer(name: str, ours: VisionTransformer) -> Peer:
    """A peer with our weights in it."""
    torchvision_operators()
    try:
        peer = PEERS[name](ours.config)
    except ImportError as error:
        raise NotComparable(f"{name} cannot be imported ({error})") from None
    peer.net.load_state_dict(peer.translate(ours.state_dict()))
    return peer


def disagreement(ours: VisionTransformer, peer: Peer, pixels: Tensor) -> tuple[float, float]:
    """The largest difference between the logits, and the relative one between all gradients of the same loss."""
    labels = torch.arange(len(pixels), device=pixels.device)
    logits = {}
    for net in (ours, peer):
        net.zero_grad()
        logits[net] = net(pixels)
        F.cross_entropy(logits[net], labels).backward()
    expected = peer.translate({name: p.grad for name, p in ours.named_parameters() if p.grad is not None})
    found = {name: p.grad for name, p in peer.net.named_parameters() if p.grad is not None}
    if expected.keys() != found.keys():
        raise AssertionError(f"gradients missing on one side: {sorted(expected.keys() ^ found.keys())}")
    # Over all tensors at once: a key bias has no true gradient (softmax cancels it), only rounding.
    difference = total_norm(found[name] - gradient for name, gradient in expected.items()) / total_norm(
        expected.values()
    )
    for net in (ours, peer):
        net.zero_grad()
    return float((logits[ours] - logits[peer]).detach().abs().max()), difference


def total_norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def torchvision_operators() -> None:
    """timm imports torchvision, whose compiled part does not load beside a CPU-only torch; no Vision Transformer needs
    it. Declaring the two operators torchvision looks up at import is enough."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEEP.append(library)


_KEEP: list[object] = []  # the operators live as long as their library object
