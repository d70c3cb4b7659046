"""What training asks of a network: its blocks, the depth of its parameters, the matrices for Muon."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from vitrail.config import LoraConfig, ModelConfig, OptimizerConfig, PrecisionConfig, ResNetConfig
from vitrail.models.build import build_model
from vitrail.models.lora import add_lora
from vitrail.models.masked import MaskedPatchNetwork
from vitrail.training.blocks import hidden_matrices, param_depths, transformer_blocks
from vitrail.training.optimizer import build_optimizer, parameter_groups
from vitrail.training.precision import set_dtypes

SMALL = {"width": 32, "depth": 3, "mlp_dim": 40, "heads": 4, "patch": (8, 8), "image_size": (16, 16), "num_classes": 3}
OPTIONS = {
    "token": {"representation": 8, "registers": 2},
    "map": {"pool": "map", "layer_scale": 0.1},
    "layers": {"positions_at": "layers", "pool": "gap", "norm": "after_pool"},
    "relative": {"positions": "relative"},
    "hybrid": {"stem": {"blocks": (1,), "width": 32}, "patch": (2, 2)},
}


def small(**options):
    return build_model(ModelConfig(**{**SMALL, **options}))


def timms(**options):
    sizes = {"img_size": 32, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **{**sizes, **options})


@pytest.mark.parametrize("kind", OPTIONS)
def test_depths_follow_the_forward_pass(kind):
    """A gradient reaches all and only what is at or before the block whose output it starts from."""
    net = small(**OPTIONS[kind])
    nn.init.normal_(net.head.weight)
    depths = param_depths(net)
    assert depths.keys() == dict(net.named_parameters()).keys()
    assert transformer_blocks(net) == list(net.blocks)
    outputs = []
    for block in net.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    net(torch.randn(2, 3, 16, 16))
    for index, output in enumerate(outputs):
        parameters = dict(net.named_parameters())
        found = torch.autograd.grad(output.sum(), list(parameters.values()), retain_graph=True, allow_unused=True)
        reached = {name for name, gradient in zip(parameters, found, strict=True) if gradient is not None}
        assert reached == {name for name, depth in depths.items() if depth <= index + 1}


def test_hidden_matrices():
    found = hidden_matrices(small(pool="map", positions="relative", layer_scale=0.1))
    layers = {"attn.qkv": 3, "attn.proj": 1, "mlp.fc1": 1, "mlp.fc2": 1}
    pool = {"q": 1, "kv": 2, "proj": 1, "mlp.fc1": 1, "mlp.fc2": 1}
    expected = {f"blocks.{index}.{layer}.weight": count for index in range(3) for layer, count in layers.items()}
    assert found == expected | {f"attn_pool.{layer}.weight": count for layer, count in pool.items()}


def test_a_masked_patch_network_reports_the_blocks_of_its_network():
    inner = small(num_classes=0)
    net = MaskedPatchNetwork(inner, "color")
    assert net.blocks is inner.blocks and transformer_blocks(net) == list(inner.blocks)
    depths = param_depths(net)
    assert depths == {
        "mask": 0,
        **{f"net.{name}": depth for name, depth in param_depths(inner).items()},
        "head.weight": 4,
        "head.bias": 4,
    }
    assert hidden_matrices(net) == {f"net.{name}": count for name, count in hidden_matrices(inner).items()}
    net.set_grad_checkpointing(True)
    net.set_residual_dtype(torch.bfloat16)
    assert all(block.grad_checkpointing and block.residual_dtype == torch.bfloat16 for block in inner.blocks)


def test_lora_matrices_have_the_depth_of_their_layer():
    net = small()
    add_lora(net, LoraConfig(rank=2))
    depths = param_depths(net)
    assert depths["blocks.1.attn.qkv.lora_a"] == depths["blocks.1.attn.qkv.weight"] == 2
    assert "blocks.1.attn.qkv.lora_a" not in hidden_matrices(net)


def test_a_resnet_has_no_blocks():
    net = build_model(ResNetConfig(kind="resnet", blocks=(1,), width=32, image_size=(16, 16), num_classes=3))
    assert not transformer_blocks(net) and not param_depths(net) and not hidden_matrices(net)
    set_dtypes(net, PrecisionConfig(compute="bf16", residual="bf16"))


@pytest.mark.parametrize("options", [{}, {"global_pool": "map", "class_token": False}, {"reg_tokens": 2}], ids=str)
def test_depths_of_a_timm_network_follow_its_parameter_order(options):
    """Names that ours has too have the same answers there."""
    theirs = timms(**options)
    kind = {"pool": "map", "class_token": False} if "global_pool" in options else {}
    ours = small(**kind, registers=options.get("reg_tokens", 0))
    depths, own = param_depths(theirs), param_depths(ours)
    same = own.keys() & depths.keys()
    assert len(same) > 30 and all(depths[name] == own[name] for name in same)
    assert depths["pos_embed"] == 0 and depths["blocks.2.norm2.bias"] == 3 and depths["head.bias"] == 4
    in_blocks = {name: count for name, count in hidden_matrices(ours).items() if name.startswith("blocks.")}
    assert hidden_matrices(theirs) == in_blocks
    assert transformer_blocks(theirs) == list(theirs.blocks)


def test_other_networks_support_layer_decay_and_muon():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = timms(num_classes=0)
            self.classifier = nn.Linear(48, 5)

    net = Wrapped()
    depths = param_depths(net)
    assert depths["backbone.patch_embed.proj.weight"] == 0 and depths["backbone.blocks.0.attn.qkv.weight"] == 1
    assert depths["backbone.norm.weight"] == depths["classifier.weight"] == 4
    groups = parameter_groups(net, OptimizerConfig(name="muon", lr=0.1, layer_decay=0.5))
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    scale = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    assert scale["backbone.cls_token"] == 0.5**4 and scale["backbone.blocks.1.norm1.bias"] == 0.25
    assert scale["classifier.bias"] == 1
    optimizer = build_optimizer(net, OptimizerConfig(name="muon", lr=0.1))
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = net.backbone.blocks[0].attn.qkv.weight.clone()
    optimizer.step()
    assert not torch.equal(before, net.backbone.blocks[0].attn.qkv.weight)


def test_a_module_with_two_networks_has_blocks_but_no_depths():
    net = nn.ModuleDict({"first": small(), "second": small()})
    assert len(transformer_blocks(net)) == 6 and not param_depths(net)
    assert len(hidden_matrices(net)) == 2 * len(hidden_matrices(small()))
