"""Comparison with the original JAX code: logits, loss and all gradient norms of small random networks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.models.build import Network, build_model
from vitrail.weights.read import read_weights

FIXTURES = Path(__file__).parents[1] / "fixtures"
# google-research/vision_transformer, with gradients
GOOGLE = [
    "google_vit_token",
    "google_vit_gap",
    "google_vit_representation",
    "google_hybrid_3stages",
    "google_hybrid_stem_only",
]
# big_vision, with the vector before the head
BIG_VISION = ["bigvision_token", "bigvision_gap_sincos", "bigvision_map", "bigvision_bit_resnet"]


def load(name: str) -> tuple[dict[str, np.ndarray], Network, torch.Tensor]:
    """The recorded outputs, vitrail's network with the recorded weights, and the recorded input."""
    recorded = dict(np.load(FIXTURES / f"{name}.npz"))
    pixels = torch.from_numpy(recorded["input"]).permute(0, 3, 1, 2)
    weights = read_weights(str(FIXTURES / f"{name}.npz"), image_size=(pixels.shape[2], pixels.shape[3]))
    net = build_model(weights.card.model)
    net.load_state_dict(weights.state)
    return recorded, net, pixels


def our_gradient(net: Network, name: str) -> torch.Tensor:
    """The gradient of the parameter with the flax name `name`."""
    direct = {"cls": net.cls_token, "Transformer/posembed_input/pos_embedding": net.pos_embed.table}
    if name in direct:
        return direct[name].grad
    *path, kind = name.split("/")
    attribute = {"kernel": "weight", "scale": "weight", "bias": "bias"}[kind]
    if path[-1] in ("query", "key", "value"):
        block = net.blocks[int(path[1].removeprefix("encoderblock_"))]
        width = net.config.width
        start = width * ("query", "key", "value").index(path[-1])
        return getattr(block.attn.qkv, attribute).grad[start : start + width]
    return getattr(our_module(net, path), attribute).grad


def our_module(net: Network, path: list[str]) -> torch.nn.Module:
    if path[0] == "Transformer" and path[1] != "encoder_norm":
        block = net.blocks[int(path[1].removeprefix("encoderblock_"))]
        modules = {"LayerNorm_0": block.norm1, "LayerNorm_1": block.norm2, "out": block.attn.proj}
        return {**modules, "Dense_0": block.mlp.fc1, "Dense_1": block.mlp.fc2}[path[-1]]
    if stage := re.fullmatch(r"block(\d+)", path[0]):
        unit = net.patch_embed.stem.stages[int(stage[1]) - 1][int(path[1].removeprefix("unit")) - 1]
        names = {"conv_proj": "shortcut", "gn_proj": "shortcut_norm"}
        return getattr(unit, names.get(path[2], path[2].replace("gn", "norm")))
    return {
        "embedding": lambda: net.patch_embed.proj,
        "conv_root": lambda: net.patch_embed.stem.root,
        "gn_root": lambda: net.patch_embed.stem.norm,
        "encoder_norm": lambda: net.norm,
        "pre_logits": lambda: net.pre_logits.fc,
        "head": lambda: net.head,
    }[path[-1]]()


def trained(name: str) -> tuple[dict[str, np.ndarray], Network, torch.Tensor, torch.Tensor]:
    """The same after one backward pass."""
    recorded, net, pixels = load(name)
    logits = net(pixels)
    loss = F.cross_entropy(logits, torch.tensor(json.loads(str(recorded["meta"]))["labels"]))
    loss.backward()
    return recorded, net, logits, loss


@pytest.mark.parametrize("name", GOOGLE)
def test_logits_and_loss_are_those_of_the_original(name):
    recorded, _, logits, loss = trained(name)
    np.testing.assert_allclose(logits.detach().numpy(), recorded["output/logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(loss.item(), recorded["output/loss"], rtol=1e-5)


@pytest.mark.parametrize("name", GOOGLE)
def test_every_gradient_norm_is_that_of_the_original(name):
    recorded, net, _, _ = trained(name)
    norms = {key.removeprefix("output/grad_norm/"): value for key, value in recorded.items() if "grad_norm" in key}
    assert len(norms) == sum(key.startswith("params/") for key in recorded)
    for key, value in norms.items():
        # A key bias shifts all scores of a query equally: its true gradient is 0, and the recorded one is rounding.
        absolute = 1e-6 if key.endswith("key/bias") else 0.0
        np.testing.assert_allclose(our_gradient(net, key).norm().item(), value, rtol=1e-5, atol=absolute, err_msg=key)
    norm = torch.stack([parameter.grad.norm() for parameter in net.parameters()]).norm().item()
    np.testing.assert_allclose(norm, np.linalg.norm(list(norms.values())), rtol=1e-5)


@pytest.mark.parametrize("name", BIG_VISION)
def test_big_vision_s_networks(name):
    recorded, net, pixels = load(name)
    with torch.no_grad():
        np.testing.assert_allclose(net(pixels).numpy(), recorded["output/logits"], rtol=0, atol=1e-5)
        features = net.forward_features(pixels).numpy()
        np.testing.assert_allclose(features, recorded["output/pre_logits"], rtol=1e-5, atol=1e-5)
        if "output/with_posemb" in recorded:  # the patch tokens, without class token
            tokens = net.add_positions(net.add_prefix_tokens(net.patch_embed(pixels)))[:, net.config.prefix :]
            np.testing.assert_allclose(tokens.numpy(), recorded["output/with_posemb"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("google_vit_token", {"gelu": "erf"}),
        ("bigvision_bit_resnet", {"pool_padding": "zeros"}),
        ("google_hybrid_3stages", {"stem": {"norm_eps": 1e-3}}),
        ("google_hybrid_3stages", {"stem": {"weight_eps_in": "variance"}}),
    ],
)
def test_constants_of_other_origins_are_told_apart(name, changes):
    """The tolerance above is small enough to detect the constants of other libraries."""
    recorded, net, pixels = load(name)
    values = net.config.model_dump()
    stem = {"stem": {**values["stem"], **changes["stem"]}} if "stem" in changes else {}
    other = build_model(type(net.config)(**{**values, **changes, **stem}))
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        assert np.abs(other(pixels).numpy() - recorded["output/logits"]).max() > 2e-5
